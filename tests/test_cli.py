"""The commands: what they print, and 0, 1 or 2."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from exporter import __version__
from tests.fakes.nvml import FakeNvml, Mig, equal_cards
from tests.harness import parse, run

pytestmark = pytest.mark.e2e

CHAT = 'fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: "2,3", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]\n'


@pytest.fixture
def chat(tmp_path: Path) -> str:
    """The path of settings with one masked fleet."""
    path = tmp_path / "chat.yaml"
    path.write_text(CHAT)
    return str(path)


def test_version() -> None:
    """`--version` prints the program's name and version."""
    assert run("--version").stdout == f"gpu-fleet-exporter {__version__}\n"


def test_once_prints_a_page(nvml: FakeNvml, chat: str) -> None:
    """`once` prints one page, nothing else, and exits 0."""
    result = run("once", "--config.file", chat, environment=nvml.environment())
    assert (result.returncode, result.stderr) == (0, "")
    assert parse(result.stdout).value("gpu_utilization_percent", fleet_index="0", physical_index="2") == 30


def test_flags_stand_before_or_behind_the_command(nvml: FakeNvml, chat: str) -> None:
    """A common flag means the same on either side of the command."""
    before = run("--config.file", chat, "explain", environment=nvml.environment())
    behind = run("explain", "--config.file", chat, environment=nvml.environment())
    assert before.returncode == behind.returncode == 0
    assert before.stdout == behind.stdout


def test_once_is_0_with_every_backend_down(tmp_path: Path) -> None:
    """`once` on a host whose named backend is down still writes its page, which says so."""
    config = tmp_path / "c.yaml"
    config.write_text("backends: [nvidia]")
    result = run("once", "--config.file", str(config))
    assert result.returncode == 0
    assert parse(result.stdout).value("gpu_exporter_backend_up", vendor="nvidia") == 0


def test_once_writes_a_file_atomically(tmp_path: Path, nvml: FakeNvml, chat: str) -> None:
    """`once --output` replaces the file by a whole page that others may read, and leaves nothing else behind."""
    folder = tmp_path / "textfile"
    folder.mkdir()
    output = folder / "gpu.prom"
    output.write_text("old")
    with output.open() as reader:
        result = run("once", "--config.file", chat, "--output", str(output), environment=nvml.environment())
        assert reader.read() == "old"
    assert (result.returncode, result.stdout) == (0, "")
    assert parse(output.read_text()).of("gpu_utilization_percent")
    assert output.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in folder.iterdir()] == ["gpu.prom"]


def test_once_that_cannot_write_is_1_and_keeps_the_old_file(tmp_path: Path, nvml: FakeNvml, chat: str) -> None:
    """A folder that is not there, or a full device, is a sentence and status 1."""
    output = tmp_path / "missing" / "gpu.prom"
    result = run("once", "--config.file", chat, "--output", str(output), environment=nvml.environment())
    assert result.returncode == 1
    assert result.stderr == f"gpu-fleet-exporter: {output}: cannot be written: No such file or directory\n"


def test_inventory_prints_a_table(nvml: FakeNvml) -> None:
    """`inventory` prints every device under the vendor tool's number, MIG devices under their board."""
    card = equal_cards(1)[0]
    size = {"total": 8 << 30, "free": 7 << 30, "used": 1 << 30}
    part = Mig(index=1, uuid="MIG-00000001-0000-5000-8000-000000000000", gi=9, ci=0, name="NVIDIA MIG 1g", **size)
    nvml.write([dataclasses.replace(card, mig=1, instances=(part,))])
    result = run("inventory", environment=nvml.environment())
    assert result.returncode == 0
    head, board, instance = (re.split(r"\s{2,}", line) for line in result.stdout.splitlines())
    assert head == ["VENDOR", "INDEX", "PCI BUS ID", "PARTITION", "UUID", "NAME", "MEMORY", "STATE"]
    assert board == ["nvidia", "0", "0000:21:00.0", "-", str(card.uuid), "NVIDIA L40S", "48.0 GiB", "ok"]
    assert instance == ["nvidia", "0", "0000:21:00.0", "9/0", str(part.uuid), "NVIDIA MIG 1g", "8.0 GiB", "ok"]


def test_a_saved_inventory_explains_offline(tmp_path: Path, nvml: FakeNvml) -> None:
    """What `inventory --format yaml` writes, `explain --inventory` reads, and answers as on the host."""
    saved = tmp_path / "host.yaml"
    saved.write_text(run("inventory", "--format", "yaml", environment=nvml.environment()).stdout)
    arguments = ("--runtime", "cuda", "--env", "CUDA_VISIBLE_DEVICES=3,1", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    offline = run("explain", "--inventory", str(saved), *arguments)
    live = run("explain", *arguments, environment=nvml.environment())
    assert offline.returncode == live.returncode == 0
    assert offline.stdout == live.stdout
    rows = [line.split() for line in offline.stdout.splitlines()[3:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("0", "3", "proven"), ("1", "1", "proven")]


def test_explain_says_where_a_list_ends(nvml: FakeNvml) -> None:
    """`explain` names the entry at which a mask's list ended, and why."""
    arguments = ("--runtime", "cuda", "--env", "CUDA_VISIBLE_DEVICES=0,9,1", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    result = run("explain", *arguments, environment=nvml.environment())
    assert "entry 2 is `9`, and there are 4 cards: the list ends" in result.stdout


AMD_HOST = """
- {index: 0, uuid: GPU-aaaaaaaaaaaaaaaa, pci: "0000:10:00.0", vendor: amd, name: MI210, kfd_node: 3}
- {index: 1, uuid: GPU-bbbbbbbbbbbbbbbb, pci: "0000:20:00.0", vendor: amd, name: MI210, kfd_node: 2}
- {index: 2, uuid: GPU-cccccccccccccccc, pci: "0000:30:00.0", vendor: amd, name: MI210, kfd_node: 1}
"""
INTEL_HOST = """
- {index: 0, uuid: null, pci: "0000:00:02.0", vendor: intel, name: UHD, tiles: 1, hpc: false, integrated: true}
- {index: 1, uuid: null, pci: "0000:30:00.0", vendor: intel, name: B580, tiles: 1, hpc: false, integrated: false}
- {index: 0, uuid: a, pci: "0000:30:00.0", vendor: intel, vk_type: discrete, driver: anv}
- {index: 1, uuid: b, pci: "0000:00:02.0", vendor: intel, vk_type: integrated, driver: anv}
"""


def offline(tmp_path: Path, host: str, *arguments: str) -> tuple[int, str]:
    """Status and output of `explain` over a saved inventory."""
    saved = tmp_path / "host.yaml"
    saved.write_text(host)
    result = run("explain", "--inventory", str(saved), *arguments)
    return result.returncode, result.stdout + result.stderr


def test_explain_shows_what_each_mask_left(tmp_path: Path) -> None:
    """Every variable has a line with what it left of the layer before, and where and why it stopped."""
    masks = ("ROCR_VISIBLE_DEVICES=0x2,1,9", "HIP_VISIBLE_DEVICES=0, 1")
    status, output = offline(tmp_path, AMD_HOST, "--runtime", "rocm", "--env", *masks)
    assert status == 0
    assert output.splitlines()[1:] == [
        "  ROCR_VISIBLE_DEVICES='0x2,1,9': 2 left; entry 3 is `9`, which names no card: the list ends here",
        "  HIP_VISIBLE_DEVICES='0, 1': 1 left; entry 2 is ` 1`, HIP does not trim, the list ends here",
        "  INDEX  PHYSICAL  PCI BUS ID    PARTITION  UUID                  NAME   EVIDENCE",
        "  0      0         0000:10:00.0  -          GPU-aaaaaaaaaaaaaaaa  MI210  proven",
    ]


def test_explain_prints_any_text_on_one_line(tmp_path: Path) -> None:
    """What stands in a mask cannot steer a terminal or break a line, and a long one is shortened."""
    for text in ("0,\x1b[31m1\n", "0,\u202e1", "0," + "x" * 100_000):
        status, output = offline(tmp_path, AMD_HOST, "--runtime", "rocm", "--env", f"HIP_VISIBLE_DEVICES={text}")
        assert status == 0
        assert len(output.splitlines()) == 5
        assert len(output) < 1500
        assert not {"\x1b", "\u202e"} & set(output)


def test_a_file_without_the_runtimes_cards(tmp_path: Path) -> None:
    """It is no answer that no device is visible."""
    status, output = offline(tmp_path, AMD_HOST, "--runtime", "cuda", "--env", "CUDA_VISIBLE_DEVICES=0")
    assert status == 1
    assert "no device of the runtime cuda was found in " in output


def test_a_variable_twice(tmp_path: Path) -> None:
    """Which of the two is meant is not for us to choose."""
    status, output = offline(tmp_path, AMD_HOST, "--runtime", "rocm", "--env", "A=1", "A=2")
    assert status == 2
    assert "--env: found A twice" in output


def test_known_facts_decide_what_the_host_does_not_tell(tmp_path: Path) -> None:
    """Without them an order is refused, with them it is answered; they are asked for by the refusal's page."""
    level_zero = ("--runtime", "level_zero", "--env", "ZE_AFFINITY_MASK=0")
    status, output = offline(tmp_path, INTEL_HOST, *level_zero)
    assert status == 1
    assert "refused: driver-order-unknown" in output
    status, output = offline(tmp_path, INTEL_HOST, *level_zero, "--known", "driver=current", "multi_driver_library=no")
    assert status == 0
    assert "  0      1         0000:30:00.0" in output
    vulkan = ("--runtime", "vulkan", "--env", "GGML_VK_VISIBLE_DEVICES=1,0")
    assert "refused: raw-order-unknown" in offline(tmp_path, INTEL_HOST, *vulkan)[1]
    status, output = offline(tmp_path, INTEL_HOST, *vulkan, "--known", "probe=same_env")
    assert [line.split()[:3] for line in output.splitlines()[3:]] == [
        ["0", "0", "0000:00:02.0"],
        ["1", "1", "0000:30:00.0"],
    ]


def test_explain_of_a_refused_fleet_is_1(tmp_path: Path, nvml: FakeNvml) -> None:
    """A refused fleet is status 1, with the code, what was found and what to do."""
    config = tmp_path / "c.yaml"
    config.write_text('fleets: [{name: mps, env: {CUDA_VISIBLE_DEVICES: "0", CUDA_MPS_PIPE_DIRECTORY: /tmp/mps}}]')
    result = run("explain", "--config.file", str(config), environment=nvml.environment())
    assert result.returncode == 1
    assert re.search(r"refused: mps: .*\n  found: .*CUDA_MPS_PIPE_DIRECTORY.*\n  to do: .*UUID", result.stdout)


@pytest.mark.parametrize(
    ("fact", "complaint"),
    [
        ("weather=fine", "--known: found fact 'weather', expected one of api, backend, driver,"),
        ("driver=new", "--known: driver: found 'new', expected one of current, old"),
        ("driver", "--known: driver: found '', expected one of current, old"),
    ],
)
def test_unknown_facts(fact: str, complaint: str, tmp_path: Path) -> None:
    """A fact that does not exist, or has another value, is bad input."""
    status, output = offline(tmp_path, AMD_HOST, "--runtime", "rocm", "--known", fact)
    assert status == 2
    assert complaint in output


def test_a_host_without_a_gpu_is_1() -> None:
    """`inventory` and `explain` on a host without any GPU say so."""
    assert run("inventory", "--path.sysfs=/nonexistent").returncode == 1
    result = run("explain", "--path.sysfs=/nonexistent")
    assert result.returncode == 1
    assert "backend-down" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["explain", "nobody", "--config.file", "{chat}"], "found fleet 'nobody', expected one of chat"),
        (["explain", "--runtime", "opengl"], "--runtime: found 'opengl', expected one of cuda, rocm,"),
        (["explain", "--env", "A=1"], "--runtime: found none, expected one of cuda, rocm,"),
        (["explain", "--runtime", "cuda", "--env", "A"], "--env: found 'A', expected NAME=VALUE"),
        (["explain", "--runtime", "rocm", "--inventory", "{chat}"], "expected a list of cards"),
        (["explain", "--runtime", "cuda", "--inventory", "/nonexistent"], "/nonexistent: cannot be read"),
        (["--web.listen-address", "nowhere"], "--web.listen-address: found 'nowhere', expected"),
        (["--web.telemetry-path", "metrics"], "--web.telemetry-path: found 'metrics', expected"),
        (["--config.file", "/nonexistent"], "/nonexistent: "),
        (["check-config", "/nonexistent"], "/nonexistent: "),
        (["once", "--config.file", "/nonexistent"], "/nonexistent: "),
        (["once", "--config.file", "/"], "/: "),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["--log.level", "loud"], "invalid choice: 'loud'"),
    ],
)
def test_bad_input_is_one_sentence_and_2(chat: str, arguments: list[str], complaint: str) -> None:
    """Bad input names the place, what was found and what was expected; status 2 and never a traceback."""
    result = run(*(argument.format(chat=chat) for argument in arguments))
    assert result.returncode == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"flets: []\n", ":1: flets: unknown key"),
        (b"fleets: []\nfleets: []\n", ":2: fleets: "),
        (b"sampling:\n  reuse_seconds: fast\n", ":2: sampling.reuse_seconds: "),
        (b"fleets:\n  - name: a\n  - name: a\n", ":3: fleets[1].name: "),
        (b"sampling: []\n", ":1: sampling: "),
        (b"\x7fELF\x00\x01", ": "),
        (b"fleets: [{name: a, runtime: opengl}]\n", "cuda"),
    ],
)
def test_check_config_names_file_line_and_key(tmp_path: Path, content: bytes, complaint: str) -> None:
    """Each kind of bad settings gives one sentence with file, line and key, and status 2, in every command."""
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    for arguments in (["check-config", str(path)], ["--config.file", str(path)], ["once", "--config.file", str(path)]):
        result = run(*arguments)
        assert result.returncode == 2, arguments
        assert f"{path}" in result.stderr
        assert complaint in result.stderr
        assert result.stderr.count("\n") == 1


def test_check_config_accepts_the_example() -> None:
    """The example that ships is valid."""
    example = Path(__file__).parent.parent / "config.example.yaml"
    result = run("check-config", str(example))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{example}: valid, 1 fleet\n"


def test_output_closed_early_is_no_traceback(nvml: FakeNvml) -> None:
    """A reader that goes away, as `head` does, ends the command quietly."""
    import subprocess

    from tests.harness import PROGRAM, clean_environment

    environment = {**clean_environment(nvml.environment()), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        result = subprocess.run(
            [*PROGRAM, "inventory"],
            env=environment,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
            timeout=30,
        )
    assert b"Traceback" not in result.stderr
    assert b"Exception" not in result.stderr


def test_an_incomplete_host_is_said_and_counted_as_such(nvml: FakeNvml) -> None:
    """While a card cannot be identified, `inventory` says so with status 1, and `explain` refuses numbers."""
    nvml.write(equal_cards(4), lines=["lost 0"])
    listed = run("inventory", "--format", "yaml", environment=nvml.environment())
    assert (listed.returncode, listed.stdout) == (1, "")
    assert "this inventory is not whole" in listed.stderr
    arguments = ("--runtime", "cuda", "--env", "CUDA_VISIBLE_DEVICES=0", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    explained = run("explain", *arguments, environment=nvml.environment())
    assert explained.returncode == 1
    assert "inventory-incomplete" in explained.stdout


def test_bytes_that_are_no_text_are_shown_escaped(nvml: FakeNvml) -> None:
    """A mask that is not UTF-8 is explained like any other, also where the output must be."""
    environment = {**nvml.environment(), "PYTHONIOENCODING": "utf-8:strict"}
    result = run("explain", "--runtime", "cuda", "--env", "CUDA_VISIBLE_DEVICES=\udcff", environment=environment)
    assert "Traceback" not in result.stderr
    assert "no device is visible" in result.stdout


@pytest.mark.parametrize("command", [["check-config"], ["once", "--config.file"], ["--config.file"]])
def test_a_pipe_is_no_settings_file(tmp_path: Path, command: list[str]) -> None:
    """A pipe that nobody writes to is refused, and not waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*command, str(pipe))
    assert result.returncode == 2
    assert result.stderr == f"gpu-fleet-exporter: {pipe}: cannot read the settings file: Not a file\n"


def test_what_is_no_file_is_not_replaced(tmp_path: Path, nvml: FakeNvml) -> None:
    """`once --output` refuses a device or a pipe, and writes to what a link leads to."""
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    refused = run("once", "--output", str(pipe), environment=nvml.environment())
    assert refused.returncode == 2
    assert pipe.is_fifo()
    assert run("once", "--output", str(link), environment=nvml.environment()).returncode == 0
    assert link.is_symlink()
    assert parse(target.read_text()).of("gpu_info")


def test_a_full_disk_is_a_sentence(nvml: FakeNvml) -> None:
    """Output that cannot be written is status 1 and one sentence, also when it was buffered."""
    import subprocess

    from tests.harness import PROGRAM, clean_environment

    for command in (["once"], ["inventory"], ["check-config", "config.example.yaml"]):
        with Path("/dev/full").open("wb") as full:
            result = subprocess.run(
                [*PROGRAM, *command],
                env={**clean_environment(nvml.environment()), "PYTHONUNBUFFERED": ""},
                cwd=Path(__file__).parent.parent,
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
                timeout=30,
            )
        assert (result.returncode, result.stderr) == (
            1,
            b"gpu-fleet-exporter: cannot write: No space left on device\n",
        )


def test_a_driver_that_is_gone_explains_nothing(tmp_path: Path) -> None:
    """`explain --env` on a host without a device of the runtime says so, and not that no device is visible."""
    result = run("explain", "--runtime", "cuda", "--env", "CUDA_VISIBLE_DEVICES=0", f"--path.sysfs={tmp_path}")
    assert result.returncode == 1
    assert "no device of the runtime cuda" in result.stderr
