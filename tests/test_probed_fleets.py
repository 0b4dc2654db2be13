"""Masks whose order only the driver knows: asked of a pretend libcuda in a process that has the masks and nothing else
of the workload, and never where the answer would not be the workload's.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.fakes import cuda
from tests.fakes.cuda import FORBIDDEN, FakeCuda
from tests.fakes.nvml import FakeNvml, Gpu, equal_cards
from tests.fakes.sysfs import FakeSys, OtherCard
from tests.fleet_pages import CARDS, QUICK, Poller, cards, evidence, explain, fleets, refusal
from tests.harness import Daemon, Start, clean_environment
from tests.process_host import ProcessHost, nvidia_files, process_host, wait_for

pytestmark = pytest.mark.e2e

FIRST, SECOND, THIRD, FOURTH = CARDS
ORDER = (2, 0, 3, 1)
"""The cards by the pretend driver's ordinals."""

NAMES = ("NVIDIA L40S", "NVIDIA A2", "NVIDIA L40S", "NVIDIA A2")
MIXED = tuple(dataclasses.replace(card, name=name) for card, name in zip(equal_cards(4), NAMES, strict=True))
STATED = "{name: stated, env: {CUDA_VISIBLE_DEVICES: '0,1'}}"


def to_cuda(card: Gpu) -> cuda.Gpu:
    return cuda.Gpu(uuid=card.uuid, pci=card.pci, name=card.name)


class Driver(FakeCuda):
    """The pretend CUDA driver of the mixed cards, beside their NVML."""

    def __init__(self, nvml: FakeNvml, directory: Path, library: Path) -> None:
        super().__init__(directory, library)
        self._nvml = nvml
        nvml.write(MIXED)
        self.say()

    def say(self, *lines: str) -> None:
        """These rules from now on."""
        self.write([to_cuda(card) for card in MIXED], order=ORDER, lines=lines)

    def environment(self) -> dict[str, str]:
        """With both libraries."""
        of_nvml, own = self._nvml.environment(), super().environment()
        return of_nvml | own | {"LD_LIBRARY_PATH": f"{self.folder}:{of_nvml['LD_LIBRARY_PATH']}"}


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake ``libcuda.so.1``, compiled once."""
    return cuda.build_or_skip(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def driver(nvml: FakeNvml, tmp_path: Path, cuda_library: Path) -> Driver:
    return Driver(nvml, tmp_path, cuda_library)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Four cards' files."""
    with process_host(tmp_path, nvidia_files(4)) as made:
        yield made


def live(folder: Path, name: str, pid: int) -> str:
    """The entry of a fleet that follows one process."""
    (folder / f"{name}.pid").write_text(str(pid))
    return f"{{name: {name}, pid_file: {folder}/{name}.pid}}"


def config(*entries: str, probe: str = "auto") -> str:
    return f"{QUICK}mapping: {{probe: {probe}}}\nfleets: [{', '.join(entries)}]"


def until_refused(daemon: Daemon, *names: str) -> None:
    """Until all of these fleets are refused for want of an order."""
    daemon.scrape_until(lambda scrape: all(refusal(scrape, name) == "order-unknown" for name in names))


def for_a_while(daemon: Daemon) -> None:
    """A few cycles, each with its time to ask."""
    for _ in range(4):
        daemon.scrape()
        time.sleep(0.4)


def asking(daemon: Daemon) -> list[int]:
    """The processes that ask a driver now."""
    return daemon.workers("exporter.asking")


def test_without_a_driver_the_order_is_not_known(
    host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """On a host of two models, with no libcuda to be found: both kinds of fleets are refused, and the log says once why
    the driver was of no help.
    """
    nvml.write(MIXED)
    entry = live(tmp_path, "followed", host.run({"CUDA_VISIBLE_DEVICES": "1"}).pid)
    daemon = start(nvml.environment(), config(STATED, entry), [], host.within)
    until_refused(daemon, "stated", "followed")
    daemon.wait_for_log(r'msg="driver gives no answer" runtime=cuda detail="the library cannot be loaded: libcuda.so.1')
    for_a_while(daemon)
    assert daemon.log.count("driver gives no answer") == 1


def test_the_drivers_order_is_shown_as_probed(host: ProcessHost, driver: Driver, tmp_path: Path, start: Start) -> None:
    """A fleet of the settings and one of a process have the cards of the driver's ordinals; it was only looked at, with
    no context made; and `explain` says whom it asked.
    """
    entry = live(tmp_path, "followed", host.run({"CUDA_VISIBLE_DEVICES": "3,1"}).pid)
    daemon = start(driver.environment(), config(STATED, entry), [], host.within)
    scrape = daemon.scrape_until(lambda scrape: bool(cards(scrape, "stated") and cards(scrape, "followed")))
    assert (cards(scrape, "stated"), cards(scrape, "followed")) == ([THIRD, FIRST], [SECOND, FIRST])
    assert evidence(scrape, "stated") == evidence(scrape, "followed") == {"probed"}
    assert "cuDeviceGetCount" in driver.record()
    shown = explain(host, driver.environment(), f"--config.file={daemon.config_path}")
    assert (shown.status, shown.cards()) == (0, {"stated": [THIRD, FIRST], "followed": [SECOND, FIRST]})
    assert "asked libcuda.so.1 12.8 under CUDA_VISIBLE_DEVICES='3,1': it shows 2 devices" in shown.out
    assert not FORBIDDEN & set(driver.record())
    asked = len(driver.record())
    for_a_while(daemon)
    assert len(driver.record()) == asked


def test_an_ordered_mask_is_not_asked_about(host: ProcessHost, driver: Driver, tmp_path: Path, start: Start) -> None:
    """What follows from the masks is proven, and no driver is loaded for it."""
    environment = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    daemon = start(driver.environment(), config(live(tmp_path, "followed", host.run(environment).pid)), [], host.within)
    scrape = daemon.scrape_until(lambda scrape: cards(scrape, "followed") == [SECOND])
    for_a_while(daemon)
    assert (evidence(scrape, "followed"), driver.record()) == ({"proven"}, [])


OF_THE_WORKLOAD = {
    "LD_PRELOAD": "/planted/preload.so",
    "PYTHONPATH": "/planted/python",
    "LD_LIBRARY_PATH": "/planted/libraries",
    "CUDA_INJECTION64_PATH": "/planted/injection.so",
    "SECRET_TOKEN": "planted-token",
}
OF_THE_DAEMON = {"CUDA_CACHE_PATH": "/daemon/cache", "NVIDIA_VISIBLE_DEVICES": "0"}


def environment_of(pid: int) -> Mapping[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)


def test_the_process_that_asks_has_the_masks_and_nothing_else_of_the_workload(
    host: ProcessHost, driver: Driver, tmp_path: Path, start: Start
) -> None:
    """Its environment is the daemon's own, without what steers drivers, and the workload's masks: no path, library or
    token of the workload's.
    """
    driver.say("hang cuInit")
    # The loader of the programs on the way complains of a library that is not there, and goes on.
    program = host.run(OF_THE_WORKLOAD | {"CUDA_VISIBLE_DEVICES": "1,0"}, becomes=("sleep", "100000"))
    entry = live(tmp_path, "followed", program.pid)
    daemon = start(driver.environment() | OF_THE_DAEMON, config(entry), [], host.within)
    until_refused(daemon, "followed")
    wait_for(lambda: bool(asking(daemon)))
    seen = environment_of(asking(daemon)[0])
    assert "planted" not in repr(seen)
    own = clean_environment(driver.environment())
    assert {name: value for name, value in seen.items() if own.get(name) != value and name != "PYTHONPATH"} in (
        {"CUDA_VISIBLE_DEVICES": "1,0"},
        {},  # asked without the mask first
    )
    assert not OF_THE_DAEMON.keys() & seen.keys()
    driver.say()
    daemon.scrape_until(lambda scrape: cards(scrape, "followed") == [FIRST, THIRD])


def test_where_it_is_switched_off_no_driver_is_asked(
    host: ProcessHost, driver: Driver, tmp_path: Path, start: Start
) -> None:
    """``mapping.probe: never``: the masks are refused, and libcuda is not even loaded."""
    entry = live(tmp_path, "followed", host.run({"CUDA_VISIBLE_DEVICES": "1"}).pid)
    daemon = start(driver.environment(), config(STATED, entry, probe="never"), [], host.within)
    until_refused(daemon, "stated", "followed")
    for_a_while(daemon)
    assert (driver.record(), refusal(daemon.scrape(), "stated")) == ([], "order-unknown")


def test_a_sleeping_card_is_not_woken_by_a_question(driver: Driver, tmp_path: Path, start: Start) -> None:
    """While a card is asleep no driver is asked, which would wake it; once it is awake it is."""
    tree = FakeSys(tmp_path / "root")
    asleep = [OtherCard(pci=FOURTH, runtime_status="suspended")]
    awake = [OtherCard(pci=address) for address in (FIRST, SECOND, THIRD)]
    tree.write([*awake, *asleep])
    daemon = start(driver.environment(), config(STATED), [f"--path.sysfs={tree.sys}"])
    scrape = daemon.scrape_until(lambda scrape: bool(refusal(scrape, "stated")))
    assert scrape.state(pci_bus_id=FOURTH) == "asleep"
    for_a_while(daemon)
    assert (driver.record(), cards(daemon.scrape(), "stated")) == ([], [])
    tree.set(FOURTH, "power/runtime_status", "active\n")
    daemon.scrape_until(lambda scrape: cards(scrape, "stated") == [THIRD, FIRST])


def test_a_process_that_cannot_open_every_card_is_not_asked_about(
    host: ProcessHost, driver: Driver, tmp_path: Path, start: Start
) -> None:
    """The driver would number other cards for it than for the exporter: the refusal stands."""
    files = nvidia_files(4)
    del files["nvidia1"]
    entry = live(tmp_path, "boxed", host.contained(files, {"CUDA_VISIBLE_DEVICES": "1"}).pid)
    daemon = start(driver.environment(), config(entry), [], host.within)
    until_refused(daemon, "boxed")
    for_a_while(daemon)
    assert (driver.record(), refusal(daemon.scrape(), "boxed")) == ([], "order-unknown")


def test_a_driver_that_hangs_holds_up_nobody(driver: Driver, start: Start) -> None:
    """Pages come as fast as ever and refuse the masks, the daemon stops at once, and what it asked is gone with it."""
    driver.say("hang cuInit")
    daemon = start(driver.environment(), config(STATED))
    until_refused(daemon, "stated")
    wait_for(lambda: bool(asking(daemon)))
    hanging = asking(daemon)
    with Poller(daemon) as poller:
        time.sleep(2.0)
    slowest = max(page.ended - page.begun for page in poller.pages)
    assert slowest < 1.0, slowest
    assert all(refusal(page.scrape, "stated") == "order-unknown" for page in poller.pages)
    assert asking(daemon) == hanging
    status, seconds = daemon.stop(signal.SIGTERM)
    assert (status, seconds < 5.0) == (0, True), seconds
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in hanging))


@pytest.mark.parametrize(
    "rule", ["crash cuInit", "crash cuDeviceGetUuid_v2", "fault cuInit 999", "fault cuDeviceGetName 1 46"]
)
def test_a_driver_that_fails_leaves_the_refusal(driver: Driver, start: Start, rule: str) -> None:
    """A crash or an error of the driver's is said in the log, and not tried again at once."""
    driver.say(rule)
    daemon = start(driver.environment(), config(STATED))
    until_refused(daemon, "stated")
    daemon.wait_for_log("driver gives no answer")
    for_a_while(daemon)
    # Under the mask and without: each is one question.
    assert driver.record().count("cuInit") == 2
    assert refusal(daemon.scrape(), "stated") == "order-unknown"
    assert "Traceback" not in daemon.log


def test_a_driver_that_does_not_show_every_card_is_not_believed(driver: Driver, start: Start) -> None:
    """Where it leaves out a card although no mask is set, the exporter does not see what the workload sees."""
    driver.write([to_cuda(card) for card in MIXED[:3]], order=(2, 0, 1))
    daemon = start(driver.environment(), config(STATED))
    until_refused(daemon, "stated")
    daemon.wait_for_log("driver asked")
    for_a_while(daemon)
    assert refusal(daemon.scrape(), "stated") == "order-unknown"


def odd_masks() -> Sequence[str]:
    return ("\udcff\udcfe", "0" * 100_000, "1,\u2028", "$(touch x)", " ", "-1", "0x1")


def test_masks_of_any_bytes_end_in_an_answer_or_a_refusal(
    host: ProcessHost, driver: Driver, tmp_path: Path, start: Start
) -> None:
    """Whatever a workload has in its mask goes to the driver as it is, and harms nobody."""
    programs = [host.run({"CUDA_VISIBLE_DEVICES": mask}).pid for mask in odd_masks()]
    names = [f"odd{place}" for place in range(len(programs))]
    entries = [live(tmp_path, name, pid) for name, pid in zip(names, programs, strict=True)]
    daemon = start(driver.environment(), config(STATED, *entries), ["--log.level=debug"], host.within)
    scrape = daemon.scrape_until(lambda scrape: cards(scrape, "stated") == [THIRD, FIRST], within=40)
    for_a_while(daemon)
    assert fleets(scrape) == {"stated", *names}
    assert cards(daemon.scrape(), "odd5") == []
    assert "Traceback" not in daemon.log
