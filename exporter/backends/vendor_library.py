"""Loading a vendor's Python package, which loads its library while it is imported."""

from __future__ import annotations

import contextlib
import ctypes
import io
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

# What vendors' packages were seen to raise while they are imported without their library, or with another version's.
_AT_IMPORT = (
    ImportError,
    OSError,
    KeyError,
    AttributeError,
    TypeError,
    ValueError,
    NameError,
    RuntimeError,
    SyntaxError,
)


class LibraryAbsentError(Exception):
    """The package or its library cannot be loaded; ``str()`` says why, in a sentence."""


def load(package: str, extra: str, stem: str, path: str | None) -> ModuleType:
    """Import a vendor's package; a library whose name has ``stem`` in it is loaded from ``path``, where that is given.

    What the package prints meanwhile is part of the reason, should it fail. Raises :class:`LibraryAbsentError`.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), _redirected(stem, path):
            return import_module(package)
    except _AT_IMPORT as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise LibraryAbsentError(f"the package {package} is not installed: pip install '{extra}'") from error
        said = " ".join(printed.getvalue().split())
        detail = said or f"{type(error).__name__}: {error}"
        raise LibraryAbsentError(f"the package {package} cannot be loaded: {detail}") from error


@contextlib.contextmanager
def _redirected(stem: str, path: str | None) -> Iterator[None]:
    """Packages look for their library in places of their own, some in one that is written into their source."""
    plain = ctypes.CDLL
    if path is None:
        yield
        return

    class Redirected(plain):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(path if stem in str(name) else name, *arguments, **options)

    ctypes.CDLL = Redirected  # type: ignore[misc]
    try:
        yield
    finally:
        ctypes.CDLL = plain  # type: ignore[misc]


class Starting:
    """A library that is started beside the kernel's files, in a thread of its own.

    Its start opens every card of the vendor, and one that hangs would take along those that can be read without it.
    """

    def __init__(self, name: str, start: Callable[[], None], *, cautious: bool, patience_seconds: float = 1.0) -> None:
        """``cautious``: never start it."""
        self._start, self._name, self._patience, self._cautious = start, name, patience_seconds, cautious
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self.absent = f"{name} is not loaded: the worker hung or died with it; a reload tries again" if cautious else ""

    def begin(self) -> None:
        """Start it, once; returns when it has started or failed, or when that takes too long to be waited for."""
        if self._thread is None and not self._cautious:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            self._done.wait(self._patience)

    @property
    def done(self) -> bool:
        """It has started."""
        return self._done.is_set() and not self.absent

    def _run(self) -> None:
        failed = "its start failed"  # whatever else it raises is printed by the thread's end
        try:
            self._start()
            failed = ""
        except LibraryAbsentError as error:
            failed = str(error)
        finally:
            self.absent = failed
            self._done.set()
