"""A made-up ``/proc`` of processes with masks, for whoever follows processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

FIRST_NAMESPACE = 4026531836  # of process numbers, in which the kernel started


def now() -> float:
    """Seconds of CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Proc:
    """A procfs of plain files, in which a file may also be a pipe that nobody writes into."""

    def __init__(self, root: Path, namespace: int = FIRST_NAMESPACE) -> None:
        self.root = root
        (root / "self/ns").mkdir(parents=True)
        (root / "self/ns/pid").symlink_to(f"pid:[{namespace}]")

    def add(
        self,
        pid: int,
        mask: str | None,
        *,
        variable: str = "CUDA_VISIBLE_DEVICES",
        stack: int = 5,
        parent: int = 1,
        group: str = "/",
        command: str = "work",
        started: float = 1.0,
        overwritten: bool = False,
    ) -> None:
        """A process with that mask, or none, which was started so many seconds after the host; ``overwritten``: it has
        its title where its environment was.
        """
        environ = b"HOME=/\0" if mask is None else f"{variable}={mask}\0".encode()
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, str(int(started * 100)), *["0"] * 5, str(stack), *["0"] * 21]
        (folder / "stat").write_text(f"{pid} (work) {' '.join(fields)} 1000 {1000 + len(environ)} 0\n")
        (folder / "cmdline").write_bytes(command.encode() + b"\0")
        (folder / "cgroup").write_text(f"0::{group}\n")
        (folder / "environ").write_bytes(b"" if overwritten else environ)

    def end(self, pid: int) -> None:
        """The process is gone."""
        for path in (self.root / str(pid)).iterdir():
            path.unlink()
        (self.root / str(pid)).rmdir()

    def hang(self, pid: int, name: str) -> None:
        """Whoever reads that file of the process waits for ever."""
        (self.root / str(pid) / name).unlink()
        os.mkfifo(self.root / str(pid) / name)

    def hide_others(self) -> None:
        """The processes of other users are not shown: the first one, which always runs, is not."""
        (self.root / "self/stat").write_text("")
