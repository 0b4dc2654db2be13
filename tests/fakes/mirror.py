"""Makes a folder equal to a tree of files and links while programs read it, and breaks files of it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Fault = Literal["eio", "empty", "fifo", "missing", "denied"]


@dataclass(frozen=True)
class Link:
    """A symbolic link with exactly this text."""

    target: str


class Tree:
    """What is to stand below a root, by path; ``owned`` are the folders that leave together with a card."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes | Link] = {}
        self.folders: dict[str, int] = {}
        self.owned: dict[str, list[str]] = {}

    def file(self, path: str, value: object) -> None:
        """A file with these bytes, or with this as a line."""
        self._add(path, text_of(value))

    def files(self, folder: str, values: Mapping[str, object]) -> None:
        """The files of a folder without those whose value is None."""
        for name, value in values.items():
            if value is not None:
                self.file(f"{folder}/{name}", value)

    def link(self, path: str, target: str) -> None:
        """A link to ``target``, a path below the same root."""
        self._add(path, Link(os.path.relpath(target, os.path.dirname(path))))  # noqa: PTH120

    def outside(self, path: str, target: str) -> None:
        """A link with exactly this text."""
        self._add(path, Link(target))

    def folder(self, path: str, mode: int = 0o755) -> None:
        """A folder, which may be empty, and those above it."""
        self.folders[path] = mode
        for parent in list(Path(path).parents)[:-1]:
            self.folders.setdefault(str(parent), 0o755)

    def _add(self, path: str, entry: bytes | Link) -> None:
        if path in self.entries:
            raise ValueError(f"two cards or programs claim {path}")
        parent = str(Path(path).parent)
        self.folder(parent, self.folders.get(parent, 0o755))
        self.entries[path] = entry


def text_of(value: object) -> bytes:
    """The text of the file that shows ``value``."""
    return value if isinstance(value, bytes) else f"{value}\n".encode()


def sync(root: Path, tree: Tree) -> None:
    """Makes ``root`` the tree. Links come last and go first: whoever follows one finds a folder that is complete."""
    root.mkdir(parents=True, exist_ok=True)
    for name, mode in sorted(tree.folders.items()):
        _place_folder(root / name, mode)
    for name, entry in sorted(tree.entries.items(), key=lambda item: isinstance(item[1], Link)):
        if not _stands(root / name, entry):
            place(root, root / name, entry)
    found = {str(path.relative_to(root)): path for path in _below(root)}
    others = [path for name, path in found.items() if name not in tree.entries and name not in tree.folders]
    for path in sorted(others, key=lambda path: not path.is_symlink()):
        clear(path)


def _below(root: Path) -> Iterator[Path]:
    """All that stands below ``root``, what is in a folder before the folder."""
    for folder, folders, files in os.walk(root, topdown=False):
        yield from (Path(folder, name) for name in (*files, *folders))


def links(root: Path) -> list[Path]:
    """All links that stand below ``root``."""
    return [path for path in _below(root) if path.is_symlink()]


def _stands(path: Path, entry: bytes | Link) -> bool:
    """Whether ``path`` is already this, with nothing broken."""
    if not os.path.lexists(path):
        return False
    if isinstance(entry, Link):
        return path.is_symlink() and str(path.readlink()) == entry.target
    return path.lstat().st_mode == stat.S_IFREG | 0o444 and path.read_bytes() == entry


def _place_folder(path: Path, mode: int) -> None:
    if path.is_symlink() or not path.is_dir():
        clear(path)
        path.mkdir()
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def place(root: Path, path: Path, entry: bytes | Link, mode: int = 0o444) -> None:
    """Puts the file or link at ``path`` by renaming, from the top of the root: nobody lists that for devices."""
    new = root / ".new"
    if isinstance(entry, Link):
        new.symlink_to(entry.target)
    else:
        new.write_bytes(entry)
        new.chmod(mode)
    if path.is_dir() and not path.is_symlink():
        clear(path)
    with _released(path):
        new.replace(path)


def damage(root: Path, path: Path, how: Fault) -> None:
    """Breaks what is at ``path``, as ``FakeSys.fault`` says."""
    if how == "eio":
        place(root, path, Link("/proc/self/mem"))
    elif how == "empty":
        place(root, path, b"")
    elif how == "denied" and path.is_dir():
        path.chmod(0)
    elif how == "denied":
        place(root, path, path.read_bytes() if path.is_file() and not path.is_symlink() else b"", mode=0)
    else:
        clear(path)
        if how == "fifo":
            os.mkfifo(path)
            path.chmod(0o644)


def clear(path: Path) -> None:
    """Takes away what is at ``path``, if anything is, with all that is below it."""
    if path.is_dir() and not path.is_symlink():
        for fifo in [below for below in _below(path) if below.is_fifo()]:
            clear(fifo)
        shutil.rmtree(path)
        return
    with _released(path):
        path.unlink(missing_ok=True)


@contextmanager
def _released(path: Path) -> Iterator[None]:
    """Programs that hang in opening ``path``, where it is a FIFO, go on once it is no longer there."""
    held = os.open(path, os.O_RDWR) if path.is_fifo() else None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)
