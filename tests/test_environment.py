"""The environment of a process: what is taken from it, and when it is none any more. Which processes count, and how."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.fleet_names import LONGEST, digest, filled
from exporter.fleets import environment, processes
from exporter.fleets.environment import OverwrittenError, parse
from exporter.fleets.members import Member, Registry, Span, Started, counted, groups
from exporter.fleets.processes import Incarnation, Stat
from exporter.masks import DEFAULT_RUNTIMES
from exporter.model import Opens, Refusal

CUDA = ("cuda",)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", {}),
        (b"A=1\0CUDA_VISIBLE_DEVICES=2,3\0B=x=y\0", {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (b"CUDA_VISIBLE_DEVICES=\0", {"CUDA_VISIBLE_DEVICES": ""}),
        (b"CUDA_VISIBLE_DEVICES=1=2\0", {"CUDA_VISIBLE_DEVICES": "1=2"}),
        (b"CUDA_VISIBLE_DEVICES=1\0CUDA_VISIBLE_DEVICES=2\0", {"CUDA_VISIBLE_DEVICES": "1"}),
        (b"CUDA_VISIBLE_DEVICES=\xff1\0", {"CUDA_VISIBLE_DEVICES": "\udcff1"}),
        (b"cuda_visible_devices=1\0XCUDA_VISIBLE_DEVICES=1\0", {}),
        (b"SLURM_JOB_GPUS=0,1\0SLURM_JOB_ID=7\0API_KEY=secret\0", {"SLURM_JOB_GPUS": "0,1"}),
        (b"GGML_SYCL_DEVICE=0\0GGML_SYCL_\xff=\0GGML_SYC=1\0", {"GGML_SYCL_DEVICE": "0", "GGML_SYCL_\udcff": ""}),
        (b"BASH_FUNC_x%%=() { :; }\0A.B=1\0", {}),
        (b"A=1\nB\0", {}),
    ],
)
def test_what_is_taken(data: bytes, expected: Mapping[str, str]) -> None:
    """The masks, what tells of llama.cpp, Slurm's cards; of one set twice the first, as getenv does. Nothing else."""
    assert parse(data) == expected


@pytest.mark.parametrize(
    "data",
    [
        *(b"\0", b"\0\0\0", b"ray::worker\0\0\0", b"title\0CUDA_VISIBLE_DEVICES=1\0"),
        *(b"A=1\0\0B=2\0", b"=1\0", b"x", b"A=1", b"title --x=1\0"),
    ],
)
def test_what_is_no_environment(data: bytes) -> None:
    """A program that sets its title writes over the environment: then nothing is known, and not that no mask is set."""
    with pytest.raises(OverwrittenError):
        parse(data)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Any bytes end in variables that are known, or in that one error."""
    with contextlib.suppress(OverwrittenError):
        others = parse(data).keys() - environment.KEPT - set(environment.SLURM)
        assert all(name.startswith("GGML_SYCL_") for name in others)


def test_what_tells_of_llama_cpp_reaches_its_runtime_alone() -> None:
    """A process's GGML_SYCL_ variable is part of its masks for SYCL, which refuses several devices for it."""
    started = Started(parse(b"GGML_SYCL_DEVICE=0\0ONEAPI_DEVICE_SELECTOR=level_zero:*\0"))
    process = member(1)._replace(started=started)
    assert set(groups([process], ["sycl"])[""].env) == {"GGML_SYCL_DEVICE", "ONEAPI_DEVICE_SELECTOR"}
    assert not groups([process], CUDA)[""].env


def member(pid: int, mask: str | None = None, *, holds: bool = False, refusal: str = "", **opens: object) -> Member:
    """A process with that mask."""
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    started = Started(env, Refusal(refusal, "x") if refusal else None)
    facts: dict[str, Any] = {"may": frozenset({"nvidia0"}), "filtered": False} | opens
    seen = Opens(**facts, holds=holds)
    return Member(Incarnation(pid, pid, pid, pid), "p", started, Span(pid, pid), seen)


@pytest.mark.parametrize(
    ("members", "one", "many"),
    [
        ([member(1), member(2, "0"), member(3, "1", holds=True)], [3], [3]),
        ([member(1), member(2, "0"), member(3, "1")], [2, 3], [2, 3]),
        ([member(1), member(2)], [1, 2], []),
        ([member(1, holds=True), member(2, "0")], [1], [1]),
        ([member(1), member(2, refusal="no-permission")], [2], [2]),
        ([member(1, "0"), member(2, refusal="no-permission")], [1], [1]),
        ([], [], []),
    ],
)
def test_which_processes_count(members: list[Member], one: list[int], many: list[int]) -> None:
    """Those with a GPU open, else those with a mask, else those that cannot be told, else all of one workload."""
    for one_workload, expected in [(True, one), (False, many)]:
        assert [each.incarnation.pid for each in counted(members, CUDA, one_workload=one_workload)] == expected


def test_an_order_is_no_choice() -> None:
    """A host may set CUDA_DEVICE_ORDER for every process."""
    only_order = member(1)._replace(started=Started({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}))
    assert counted([only_order], DEFAULT_RUNTIMES, one_workload=False) == []


def test_the_same_masks_are_one_fleet() -> None:
    """The oldest process stands for all of them, and what one has open beside makes no difference."""
    found = groups([member(2, "0"), member(1, "0", holds=True)], CUDA)
    assert list(found) == [""]
    assert found[""].oldest.incarnation.pid == 1


def test_parts_of_a_fleet_are_told_apart_by_masks_and_reach() -> None:
    """Their endings come from these alone: the same for other processes, in any order, and after a restart."""
    first = groups([member(1, "0"), member(2, "1"), member(3, "0", may=frozenset())], CUDA)
    again = groups([member(9, "0", may=frozenset()), member(7, "1"), member(8, "0")], CUDA)
    assert len(first) == 3
    assert set(first) == set(again)
    assert all(len(ending) == 9 and ending[0] == "/" for ending in first)


def test_what_one_has_open_proves_nothing_for_another() -> None:
    """Behind a filter whose content is not known a process can open what it has open, and another may not."""
    seen: dict[str, Any] = {"may": frozenset({"nvidia0", "nvidia1"}), "filtered": None}
    held = [frozenset({"nvidia0", "nvidia1"}), frozenset({"nvidia1"})]
    both = [member(pid, "0", **seen, held=files) for pid, files in enumerate(held, 1)]
    (group,) = groups(both, CUDA).values()
    assert group.opens.held == {"nvidia1"}


def test_variables_of_other_runtimes_do_not_tell_apart() -> None:
    """A CUDA fleet is not split by what Vulkan reads."""
    other = member(2, "0")
    other = other._replace(started=Started({**other.started.env, "DISPLAY": ":1"}))
    assert list(groups([member(1, "0"), other], CUDA)) == [""]


@pytest.mark.parametrize(
    ("template", "values", "expected"),
    [
        ("slurm-{job}", {"job": "42"}, "slurm-42"),
        ("{unit}", {"unit": "a\\x2db@1.service"}, "a\\x2db@1.service"),
        ("{a}{b}", {"a": "x"}, "x"),
        ("{a}", {"a": 'x"\n{b}'}, "x___b_~" + digest('x"\n{b}')),
        ("{a}", {}, "unnamed"),
    ],
)
def test_names_are_filled_in(template: str, values: dict[str, str], expected: str) -> None:
    """A value has no effect but its text, and no character that names do not have."""
    assert filled(template, values) == expected


def test_long_names_stay_apart() -> None:
    """A name that is too long ends in digits of its own."""
    names = {filled("{id}", {"id": "f" * 300 + last}) for last in "ab"}
    assert len(names) == 2
    assert {len(name) for name in names} == {LONGEST}
    assert len({filled("{id}", {"id": text}) for text in ("a b", "a_b", "a\tb")}) == 3


def named(name: str, pid: int) -> Stat:
    """The process, once it has that name, and an environment."""
    while True:
        found = processes.stat("/proc", pid)
        if found is not None and found.name.startswith(name) and found.incarnation.environment:
            return found
        time.sleep(0.005)


def test_a_program_is_told_from_another_in_the_same_process() -> None:
    """The environment is read once a program: exec gives another incarnation, and the former is not running."""
    registry = Registry("/proc")
    code = "import os, sys; sys.stdin.read(1); os.execve('/bin/sleep', ['sleep', '60'], {'CUDA_VISIBLE_DEVICES': '1'})"
    env = {"CUDA_VISIBLE_DEVICES": "0", "PATH": os.environ["PATH"]}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        before = named("python", process.pid)
        first = registry.of(before)
        process.stdin.write(b"x")
        process.stdin.close()
        after = named("sleep", process.pid)
        assert not processes.runs("/proc", before.incarnation)
        second = registry.of(after)
        process.kill()
    assert first is not None
    assert second is not None
    assert [found.env for found, _ in (first, second)] == [{"CUDA_VISIBLE_DEVICES": mask} for mask in "01"]
    assert before.incarnation.started_seconds < first[1].latest <= second[1].earliest < second[1].latest
    assert registry.of(before) == first
    registry.keep([])
    assert registry.of(after) is None


def test_an_environment_that_cannot_be_read_whole() -> None:
    """The kernel ends early where memory cannot be read, which is no end of the environment."""
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "1"}
    with subprocess.Popen(["sleep", "60"], env=env) as process:
        found = named("sleep", process.pid)
        whole = Registry("/proc").of(found)
        longer = Registry("/proc").of(found._replace(environment_bytes=found.environment_bytes + 1))
        process.kill()
    assert whole is not None
    assert longer is not None
    assert whole[0].env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert longer[0].refusal is not None
    assert longer[0].refusal.code == "environment-overwritten"
