"""The manual page against the program that it describes."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from exporter import __version__, arguments
from exporter.facts import FACTS
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES
from tests.fakes.shared_object import fail_in_ci_else_skip

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/gpu-fleet-exporter.1"
UNIT = ROOT / "systemd/gpu-fleet-exporter.service"
FLAG = re.compile(r"\\-\\-[a-z]+(?:(?:\.|\\-)[a-z]+)*")
EVERYWHERE = "All commands"
FORMATTERS = {
    "groff": ["groff", "-man", "-Tutf8", "-ww", "-z"],
    "man": ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"],
}


def plain(source: str) -> str:
    """The source with its escaped hyphens as hyphens."""
    return source.replace(r"\-", "-")


def parts(source: str, macro: str) -> dict[str, str]:
    """What stands under each heading of the macro, by heading."""
    _, *found = re.split(rf"^\.{macro} (.+)\n", source, flags=re.MULTILINE)
    return {plain(name): text for name, text in zip(found[::2], found[1::2], strict=True)}


def section(name: str) -> str:
    return parts(PAGE.read_text(), "SH")[name]


def heads(source: str) -> list[str]:
    """The lines that name what an indented paragraph is about."""
    return re.findall(r"^\.TP\n(.+)", source, re.MULTILINE)


def words(source: str) -> set[str]:
    """Its words, without the macros' names and the marks around them."""
    return set(re.findall(r"[\w.+-]*\w", re.sub(r"^\.[A-Z]+ ", "", plain(source), flags=re.MULTILINE)))


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    top = arguments.parser()._actions
    (found,) = [action.choices for action in top if isinstance(action, argparse._SubParsersAction)]
    return dict(found)


def owners() -> dict[str, set[str]]:
    """The flags that one command alone or two take, by these commands, and all others by :data:`EVERYWHERE`."""
    known = {name: flags(parser) for name, parser in commands().items()}
    found: dict[str, set[str]] = {}
    for flag in flags(arguments.parser()).union(*known.values()):
        takers = [name for name, taken in known.items() if flag in taken]
        heading = " and ".join(takers) if 1 <= len(takers) <= 2 else EVERYWHERE
        found.setdefault(heading, set()).add(flag)
    return found


def test_every_command_is_described() -> None:
    """COMMANDS describes the commands that there are, and SYNOPSIS shows each of them."""
    assert {plain(head).removeprefix(".B ") for head in heads(section("COMMANDS"))} == set(commands())
    assert set(commands()) <= words(section("SYNOPSIS"))


def test_every_flag_is_described_under_the_command_that_takes_it() -> None:
    """OPTIONS describes each long flag once, under the commands that take it or under those of all commands."""
    described = {
        name: sorted(plain(flag) for head in heads(text) for flag in FLAG.findall(head))
        for name, text in parts(section("OPTIONS"), "SS").items()
    }
    assert described == {name: sorted(taken) for name, taken in owners().items()}


def test_no_other_flag_is_named() -> None:
    """No long flag stands anywhere in the page that the parser does not know."""
    named = {plain(flag) for flag in FLAG.findall(PAGE.read_text())}
    assert named == set().union(*owners().values())


def test_flags_can_be_copied() -> None:
    """The hyphens in front of a flag are escaped: others may be shown as a character that no shell takes for one."""
    assert re.findall(r"(?<![\w\\])-\S*", PAGE.read_text()) == []


def test_every_value_that_a_flag_takes_is_named() -> None:
    """OPTIONS names every value of the flags that take some values alone, and no runtime or fact is left out."""
    actions = [action for parser in commands().values() for action in parser._actions]
    values = {value for action in actions for value in action.choices or ()}
    facts = {word for fact, meanings in FACTS.items() for word in (fact, *meanings)}
    assert {"logfmt", "yaml"} <= values
    assert (values | facts | set(RUNTIMES)) - words(section("OPTIONS")) == set()


def test_every_mask_that_makes_a_fleet_is_named() -> None:
    """ENVIRONMENT names every variable of the daemon's own environment from which a fleet is made."""
    masks = {variable for name in DEFAULT_RUNTIMES for variable in RUNTIMES[name].masks}
    assert masks - words(section("ENVIRONMENT")) == set()


@pytest.mark.parametrize("setting", ["Environment=CONFIG=", "EnvironmentFile=-"])
def test_the_files_of_the_service_are_named(setting: str) -> None:
    """FILES has an entry for each file that the unit hands to the program or reads for it."""
    found = re.findall(rf"^{setting}(/.+)$", UNIT.read_text(), re.MULTILINE)
    assert found
    assert set(found) <= {plain(head).removeprefix(".I ") for head in heads(section("FILES"))}


def test_the_variables_of_the_service_are_named() -> None:
    """FILES names each variable that an administrator can set for the unit's command line."""
    used = set(re.findall(r"\$\{?([A-Z]+)\b", re.findall(r"^ExecStart=(.+)$", UNIT.read_text(), re.MULTILINE)[0]))
    assert used
    assert {name for name in used if f"{name}=" not in section("FILES")} == set()


def test_the_version_is_left_out() -> None:
    """No version stands in the page, where it would go stale."""
    assert __version__ not in PAGE.read_text()


@pytest.mark.e2e
def test_the_page_is_formatted_without_a_warning() -> None:
    """A formatter has nothing to say about the page."""
    known = [command for name, command in FORMATTERS.items() if shutil.which(name)]
    if not known:
        fail_in_ci_else_skip("neither groff nor man is on PATH (Debian: apt-get install groff-base)")
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    result = subprocess.run([*known[0], str(PAGE)], capture_output=True, text=True, env=environment, check=False)
    assert (result.returncode, result.stderr) == (0, "")
