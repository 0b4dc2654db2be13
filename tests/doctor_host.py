"""Runs the real ``doctor`` and takes what it prints apart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.harness import PROGRAM, clean_environment
from tests.process_host import ProcessHost

ROOT = Path(__file__).parent.parent
NULL = (1, 3)
"""The numbers of /dev/null, which everybody's driver serves: a file of any name with them can be opened."""
NO_ADDRESS = "--web.listen-address=127.0.0.1:0"
HOST = "fleets: [{name: host, runtime: host}]\n"

Within = Callable[[Sequence[str]], Sequence[str]]


class Found(NamedTuple):
    """One finding of the JSON form."""

    check: str
    subject: str
    level: str
    found: str
    fix: str


class Diagnosis(NamedTuple):
    """What it found, its exit status, and all that it printed, errors included."""

    findings: tuple[Found, ...]
    status: int
    text: str

    def of(self, check: str, subject: str = "", level: str = "") -> Iterator[Found]:
        """The findings of a check whose subject has this in it."""
        for each in self.findings:
            if each.check == check and subject in each.subject and level in ("", each.level):
                yield each

    def one(self, check: str, subject: str = "") -> Found:
        """The one finding; fails when there is none, or more than one."""
        found = list(self.of(check, subject))
        assert len(found) == 1, (check, subject, self.text)
        return found[0]

    def bad(self) -> list[Found]:
        """All that is not as it should be."""
        return [each for each in self.findings if each.level != "PASS"]


def printed(*flags: str, environment: Mapping[str, str] | None = None, within: Within = list) -> tuple[int, str, str]:
    """Exit status, output and errors."""
    command = within([*PROGRAM, "doctor", *flags])
    result = subprocess.run(
        command,
        env={**clean_environment(environment or {}), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    return result.returncode, result.stdout, result.stderr


def doctor(*flags: str, environment: Mapping[str, str] | None = None, within: Within = list) -> Diagnosis:
    """What it finds; on an address of its own, unless one is among the flags."""
    address = () if any(flag.startswith("--web.") for flag in flags) else (NO_ADDRESS,)
    status, out, errors = printed(*flags, *address, "--format=json", environment=environment, within=within)
    assert "Traceback" not in errors, errors
    assert out, errors
    document = json.loads(out)
    assert set(document) == {"version", "worst", "findings"}
    findings = tuple(Found(**each) for each in document["findings"])
    return Diagnosis(findings, status, out + errors)


def settings(folder: Path, text: str) -> str:
    """The flag for a file with these settings."""
    path = folder / "doctor.yaml"
    path.write_text(text)
    path.chmod(0o644)
    return f"--config.file={path}"


def as_user(host: ProcessHost, user: int, *, before: str = ":") -> Within:
    """Runs a command in the host as a user of no group, after a shell's commands as root, in a namespace of its own."""
    setpriv = f"exec setpriv --reuid={user} --regid={user} --clear-groups"
    script = f'set -e; {before}; {setpriv} "$@"'
    return lambda command: host.within(["unshare", "--mount", "sh", "-c", script, "sh", *command])


def open_everything(host: ProcessHost, *folders: Path) -> None:
    """Lets other users run this Python and this project there, and see the folders."""
    for folder in folders:
        folder.chmod(0o755)
    host.open_to_others(Path(sys.base_prefix), Path(sys.prefix), ROOT, *folders)
