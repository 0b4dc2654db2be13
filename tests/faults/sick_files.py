"""Files of which a read fails with any error number, comes late, or keeps its process in the kernel, where nothing can
end it. They are FUSE's: a small server of its protocol, without any library.

A process that reads a file whose server has taken the request, and does not answer, is in uninterruptible sleep as
soon as it is to be killed: it stays until the answer comes, as with a driver that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.mirror import Link
from tests.fakes.shared_object import fail_in_ci_else_skip

LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, INTERRUPT = 1, 2, 3, 14, 15, 18, 25, 26, 36
_NO_ANSWER = (FORGET, INTERRUPT, 42)  # 42: several to forget
_HEAD, _REPLY = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
_ENOENT, _ENOSYS = 2, 38
_DIRECT_IO = 1
_ROOT, _MOST_BYTES = 1, 1 << 17


class SickFiles:
    """A folder whose files are called after what is wrong with them.

    ``error-22`` answers every read with that error number; ``late-1500`` answers after so many milliseconds with the
    text that :attr:`text` had when it was asked; ``stuck`` does not answer before :meth:`release`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, b""
        self._names: dict[int, str] = {}
        self._released = threading.Event()
        self._lock = threading.Lock()
        folder.mkdir()
        self._device = os.open("/dev/fuse", os.O_RDWR)
        self._mount()
        threading.Thread(target=self._serve, name="sick files", daemon=True).start()

    def link(self, name: str) -> Link:
        """What a file of another tree is to be, to be sick in that way."""
        return Link(str(self.folder / name))

    def release(self) -> None:
        """Whatever is stuck has its answer, and nothing is stuck any more."""
        self._released.set()

    def close(self) -> None:
        """The folder is empty, and who waits is told an error."""
        self.release()
        subprocess.run(["umount", "--lazy", self.folder], check=False)
        with contextlib.suppress(OSError):
            os.close(self._device)

    def _mount(self) -> None:
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"sick", os.fsencode(self.folder), b"fuse.sick", 0, options):
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, os.strerror(number))

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MOST_BYTES + 4096)
            except OSError:  # the folder is no longer mounted
                return
            _, operation, unique, node, *_ = _HEAD.unpack_from(request)
            if operation in _NO_ANSWER:
                continue
            if operation == READ:  # each in a thread of its own: one that is stuck holds up no other
                threading.Thread(target=self._read, args=(unique, node, self.text), daemon=True).start()
                continue
            self._answer(unique, *self._known(operation, node, request[_HEAD.size :]))

    def _known(self, operation: int, node: int, body: bytes) -> tuple[int, bytes]:
        """The error number, and what else there is to say."""
        if operation == INIT:
            return 0, struct.pack("<IIIIHHI", 7, 31, 0, 0, 16, 12, _MOST_BYTES) + bytes(40)
        if operation == LOOKUP:
            name = body.rstrip(b"\0").decode()
            found = hash(name) & 0x7FFFFFFF | 2
            self._names[found] = name
            return 0, struct.pack("<QQQQII", found, 0, 1, 1, 0, 0) + _attributes(found)
        if operation == GETATTR:
            return 0, struct.pack("<QII", 1, 0, 0) + _attributes(node)
        if operation == OPEN:
            return 0, struct.pack("<QII", 0, _DIRECT_IO, 0)
        return (0, b"") if operation in (RELEASE, FLUSH) else (_ENOSYS, b"")

    def _read(self, unique: int, node: int, text: bytes) -> None:
        kind, _, number = self._names[node].partition("-")
        if kind == "error":
            self._answer(unique, int(number), b"")
            return
        if kind == "late":
            time.sleep(int(number) / 1000)
        else:
            self._released.wait()
        self._answer(unique, 0, text)

    def _answer(self, unique: int, error: int, data: bytes) -> None:
        with contextlib.suppress(OSError), self._lock:  # who asked may be gone
            os.write(self._device, _REPLY.pack(_REPLY.size + len(data), -error, unique) + data)


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o444
    return struct.pack("<6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


@contextlib.contextmanager
def sick_files(folder: Path) -> Iterator[SickFiles]:
    """The folder while it is used. Where none can be mounted the test is skipped, loudly; it fails if ``CI=true``."""
    try:
        files = SickFiles(folder)
    except OSError as error:
        fail_in_ci_else_skip(f"no FUSE file system can be mounted, which needs root and /dev/fuse: {error}")
    try:
        yield files
    finally:
        files.close()
