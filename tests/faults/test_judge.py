"""The judge of pages can tell: each kind of wrong page that it is for is one that it complains of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.harness import Daemon, parse
from tests.truth import Truth, built
from tests.truth_page import PageError, read

pytestmark = pytest.mark.e2e


class Known(NamedTuple):
    """A host, and a page of it without fault, of one tick."""

    truth: Truth
    text: str
    tick: int

    def complaints(self, text: str) -> list[str]:
        """Of that text, were it the page."""
        return self.truth.complaints(text, self.tick, self.tick)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """A page on which every card has every reading."""
    directory = tmp_path_factory.mktemp("judge")
    truth = Truth(directory, built(directory / "libraries"))
    with Daemon(directory, truth.environment(), truth.config(), truth.flags()) as daemon:
        while daemon.request("/-/ready").status != 200:  # a page would join the cycle that began with the daemon
            time.sleep(0.05)
        for _ in range(60):
            truth.step()
            page = truth.look(daemon, 5)
            assert page.complaints == []
            if "\ngpu_utilization_percent{" in page.text and page.text.count("\ngpu_utilization_percent{") == 11:
                break
        truth.step()
        yield Known(truth, page.text, page.first)


def _lines(page: Known, name: str, *parts: str) -> list[str]:
    return [
        each for each in page.text.splitlines() if each.startswith(f"{name}{{") and all(part in each for part in parts)
    ]


READINGS = (
    *("gpu_utilization_percent", "gpu_memory_free_bytes", "gpu_memory_used_bytes", "gpu_memory_total_bytes"),
    "gpu_temperature_celsius",
)


def test_a_page_without_fault_has_no_complaint(known: Known) -> None:
    """Eleven readings of each name: seven cards, and four that fleets have too."""
    assert known.complaints(known.text) == []
    assert {name: len(_lines(known, name)) for name in READINGS} == dict.fromkeys(READINGS, 11)


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "intel"])
@pytest.mark.parametrize("name", READINGS)
def test_another_cards_reading_is_seen(known: Known, name: str, vendor: str) -> None:
    """Two cards' values are swapped under their labels."""
    one, other = _lines(known, name, 'fleet="host"', f'vendor="{vendor}"')[:2]
    assert known.complaints(known.text.replace(one, f"{one.rpartition(' ')[0]} {other.rpartition(' ')[2]}"))


@pytest.mark.parametrize("late", [1, -1])
def test_a_reading_of_another_time_is_seen(known: Known, late: int) -> None:
    """The page is of the tick before the one in force, or after it: each reading that tells a time is seen."""
    found = known.truth.complaints(known.text, known.tick + late, known.tick + late)
    for name, count in zip(READINGS, (8, 11, 11, 0, 11), strict=True):  # Intel's utilization, and totals, tell none
        assert len([line for line in found if name in line]) == count


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("another fleet index", 'fleet="chat",fleet_index="0"', 'fleet="chat",fleet_index="1"'),
        ("another physical index", 'physical_index="2"', 'physical_index="1"'),
        ("another address", 'pci_bus_id="0000:41:00.0"', 'pci_bus_id="0000:61:00.0"'),
        ("an address of eight digits", 'pci_bus_id="0000:41:00.0"', 'pci_bus_id="00000000:41:00.0"'),
        ("a fleet that is none", 'fleet="train"', 'fleet="other"'),
        ("readings of a card that is not ok", 'state="ok",vendor="intel"} 1.0', 'state="ok",vendor="intel"} 0.0'),
        ("two states", 'state="hung",vendor="intel"} 0.0', 'state="hung",vendor="intel"} 1.0'),
        ("a backend down without a reason", 'backend_up{vendor="amd"} 1.0', 'backend_up{vendor="amd"} 0.0'),
        (
            "a refusal without a reason",
            'inverted{fleet="chat",runtime="cuda"} 1.0',
            'inverted{fleet="chat",runtime="cuda"} 0.0',
        ),
        ("another card's name", 'name="NVIDIA Pretend 2"', 'name="NVIDIA Pretend 3"'),
        ("no number", "gpu_exporter_fleets_left_out 0.0", "gpu_exporter_fleets_left_out NaN"),
        ("a label of Prometheus's", 'vendor="intel"', 'instance="x",vendor="intel"'),
    ],
)
def test_what_else_is_wrong_is_seen(known: Known, what: str, old: str, new: str) -> None:
    """One kind of mistake, everywhere on the page."""
    assert old in known.text, what
    assert known.complaints(known.text.replace(old, new)), what


@pytest.mark.parametrize("sentinel", ["0", "-1", "NaN", "255", "1.8446744073709552e+19"])
@pytest.mark.parametrize("name", READINGS)
def test_numbers_that_stand_for_unknown_are_seen(known: Known, name: str, sentinel: str) -> None:
    """In place of one reading."""
    line = _lines(known, name)[0]
    assert known.complaints(known.text.replace(line, f"{line.rpartition(' ')[0]} {sentinel}"))


def test_the_reader_reads_as_the_client_library_does(known: Known) -> None:
    """The same samples, and an error where that library lets a page pass."""
    ours, theirs = read(known.text), parse(known.text)
    assert {name: [(dict(each.labels), each.value) for each in rows] for name, rows in ours.samples.items()} == {
        name: [(dict(each.labels), each.value) for each in rows] for name, rows in theirs.samples.items()
    }
    line = _lines(known, "gpu_info")[0]
    family = known.text[known.text.index("# HELP gpu_info ") : known.text.index(line)]
    for broken in (
        known.text.replace(line, f"{line}\n{line}"),
        known.text + family,
        known.text.replace(line, line.replace('"', "", 1)),
        known.text.removesuffix("\n"),
        known.text + "nonsense 1\n",
    ):
        with pytest.raises(PageError):
            read(broken)


def test_texts_of_labels_are_read() -> None:
    """A backslash, a quote and a line break stand behind a backslash."""
    page = read('# HELP a A.\n# TYPE a gauge\na{b="x\\\\y\\"z\\n,}"} 1\n')
    assert page.of("a")[0].labels == {"b": 'x\\y"z\n,}'}
