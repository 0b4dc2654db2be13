"""Reading a file that a person named, whatever the name turns out to be."""

from __future__ import annotations

import os
import stat


class NotAFileError(OSError):
    """A path that should name a file names a pipe, a device or a folder."""


def read_regular(path: str, most: int) -> bytes:
    """The first ``most`` bytes of a regular file.

    A pipe without a writer or a device would be waited for for ever, so anything but a file is refused: raises
    :class:`NotAFileError`, ``OSError`` when it cannot be read, and ``ValueError`` when the name is none.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotAFileError(0, "Is a directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "Not a file")
        return file.read(most)
