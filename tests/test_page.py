"""The page for people, in a real Chromium over the real daemon: what it shows in every state, and no more than that."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.collectors import ReloadStatus
from exporter.refusals import REFUSALS
from exporter.reports import visible
from exporter.web.page import EVIDENCE_MEANINGS, Surroundings, page
from exporter.web.people import POLICY
from exporter.web.report import report
from tests.browser import Browser, Tab, axe_core
from tests.fakes.nvml import FakeNvml, Gpu, Mig, build_or_skip, equal_cards, watched_cards
from tests.fakes.sysfs import AmdCard, FakeSys, KfdNode
from tests.harness import Daemon, Scrape, Start
from tests.test_api import hostile

AROUND = Surroundings("/metrics", "/api/v1/fleets", 8.0)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;'"
TAB, ENTER = ("Tab", 9), ("Enter", 13)
SLEEPER = "0000:03:00.0"
SETTINGS = """
sampling: {deadline_seconds: 1, reuse_seconds: 0}
backends: [nvidia, amd]
fleets:
  - {name: chat, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "2,3", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - {name: batch, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "3,0,1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - {name: rerank, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "0"}}
  - {name: nothing, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: ""}}
"""
POWER_LIMIT = 190  # the field of NVML's
READINGS = {
    "utilization": ("gpu_utilization_percent", None),
    "memory": ("gpu_memory_used_bytes", "gpu_memory_total_bytes"),
    "temperature": ("gpu_temperature_celsius", None),
}
ROWS = """
[...document.querySelectorAll("article tbody tr")].map((row) => ({
  fleet: row.closest("article").querySelector("h3").textContent,
  index: row.querySelector("th").textContent,
  text: row.textContent,
  state: row.querySelector(".badge")?.textContent,
  bars: Object.fromEntries([...row.querySelectorAll("meter")].map((bar) =>
    [bar.closest('td').className, [bar.value, bar.max, bar.getBoundingClientRect().width > 20]])),
}))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_core(tmp_path_factory.mktemp("axe"))


class Host:
    """Four NVIDIA cards, of which the last has a hostile name, and one of AMD's that sleeps, behind a daemon."""

    def __init__(self, directory: Path) -> None:
        self.nvml = FakeNvml(directory, build_or_skip(directory / "lib"))
        first, *others, last = watched_cards(4)
        unlimited = tuple(field for field in first.fields if not field.startswith(f"{POWER_LIMIT} "))
        first = dataclasses.replace(first, fields=unlimited)
        self.cards = (first, *others, dataclasses.replace(last, name=HOSTILE))
        tree = FakeSys(directory)
        tree.write([AmdCard(pci=SLEEPER, runtime_status="suspended", kfd_nodes=(KfdNode(node=1),))])
        self.nvml.write(self.cards)
        flags = ["--web.enable-lifecycle", f"--path.sysfs={tree.sys}"]
        self.daemon = Daemon(directory, self.nvml.environment(), SETTINGS, flags)
        self.url = f"http://127.0.0.1:{self.daemon.port}/"

    def has(self, cards: Sequence[Gpu] | None = None, lines: Sequence[str] = ()) -> None:
        """Other cards, or other faults."""
        self.nvml.write(self.cards if cards is None else cards, lines=lines)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("page"))
    with made.daemon:
        made.daemon.scrape_until(lambda page: len(page.of("gpu_utilization_percent")) == 5)
        yield made


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> None:
    """Each test finds the cards well."""
    if "host" in request.fixturenames:
        well: Host = request.getfixturevalue("host")
        well.has()
        well.daemon.scrape_until(lambda page: len(page.of("gpu_utilization_percent")) == 5)


def bars_of(scrape: Scrape) -> dict[tuple[str, str], dict[str, list[Any]]]:
    """The bars that a page has to have, by fleet and index."""
    bars: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for kind, (family, most) in READINGS.items():
        for sample in scrape.of(family):
            own = {name: sample.labels[name] for name in ("fleet", "fleet_index")}
            limit = scrape.value(most, **own) if most else {"utilization": 100, "temperature": 110}[kind]
            bars.setdefault((own["fleet"], own["fleet_index"]), {})[kind] = [sample.value, limit, True]
    return bars


def power_of(scrape: Scrape, fleet: str, index: str) -> str:
    """As the page has to tell it."""
    found = {
        name: sample.value
        for name in ("gpu_power_watts", "gpu_power_limit_watts")
        for sample in scrape.of(name)
        if (sample.labels["fleet"], sample.labels["fleet_index"]) == (fleet, index)
    }
    return " of ".join(f"{value:.0f}" for value in found.values()) + " W"


def rows(tab: Tab) -> dict[tuple[str, str], dict[str, Any]]:
    found: list[dict[str, Any]] = tab.evaluate(ROWS)
    return {(row["fleet"], row["index"]): row for row in found}


# --- what it shows


@pytest.mark.e2e
@pytest.mark.parametrize("scripts", [True, False])
def test_bars_are_the_scraped_values(browser: Browser, host: Host, scripts: bool) -> None:
    """With scripts and without, each fleet's index has the bars of its card's readings, and the card's number."""
    with browser.tab(scripts=scripts) as tab:
        tab.go(host.url)
        shown, scrape = rows(tab), host.daemon.scrape()
        assert {place: row["bars"] for place, row in shown.items()} == bars_of(scrape)
        assert len(shown) == 5
        for sample in scrape.of("gpu_fleet_device_info"):
            row = shown[sample.labels["fleet"], sample.labels["fleet_index"]]
            assert f"GPU {sample.labels['physical_index']}" in row["text"]
            assert sample.labels["pci_bus_id"] in row["text"]
            assert power_of(scrape, sample.labels["fleet"], sample.labels["fleet_index"]) in row["text"]
        assert tab.complaints() == []


@pytest.mark.e2e
def test_every_state_is_told_in_words_and_without_numbers(browser: Browser, host: Host) -> None:
    """A lost, a hung and a sleeping card have their state in words and no bar; others have theirs."""
    host.has(lines=["lost 1", "hang nvmlDeviceGetTemperatureV 2"])
    host.daemon.scrape_until(lambda page: page.state(physical_index="2") == "hung")
    with browser.tab() as tab:
        tab.go(host.url)
        shown = rows(tab)
        hung, lost = shown["chat", "0"], shown["batch", "2"]
        assert (hung["state"], hung["bars"]) == ("hung", {})
        assert "it did not answer in time" in hung["text"]
        assert (lost["state"], lost["bars"]) == ("lost", {})
        assert set(shown["chat", "1"]["bars"]) == set(READINGS)
        spare = tab.evaluate("document.getElementById('spare').parentElement.innerText")
        assert SLEEPER in spare
        assert "asleep powered down" in spare
        assert tab.evaluate("document.querySelector('.summary').innerText").count("1 ") >= 3


@pytest.mark.e2e
def test_a_refused_fleet_has_the_reason_and_what_to_do_and_no_card(browser: Browser, host: Host) -> None:
    """A refused fleet says why and what to do about it; a mask that hides everything says that."""
    with browser.tab() as tab:
        tab.go(host.url)
        text = tab.evaluate("document.getElementById('fleet-rerank').innerText")
        code = REFUSALS["order-unknown"]
        assert f"refused because {code.meaning}." in text
        assert code.advice in text
        assert "CUDA_VISIBLE_DEVICES=0" in text
        assert tab.evaluate("document.querySelectorAll('#fleet-rerank table, #fleet-rerank meter').length") == 0
        assert "leave no device visible" in tab.evaluate("document.getElementById('fleet-nothing').innerText")
        assert EVIDENCE_MEANINGS["proven"] in tab.evaluate("document.getElementById('fleet-chat').innerText")


@pytest.mark.e2e
def test_hostile_names_are_text(browser: Browser, host: Host) -> None:
    """A card whose name is markup is called so, and nothing of it becomes an element."""
    with browser.tab() as tab:
        tab.go(host.url)
        assert HOSTILE in rows(tab)["chat", "1"]["text"]
        assert tab.evaluate("document.querySelectorAll('img, main script').length") == 0
        tab.evaluate("window.here = true")
        tab.until("document.querySelector('time').textContent !== '' && window.here")
        assert tab.complaints() == []


@pytest.mark.e2e
def test_what_went_wrong_with_the_exporter_is_told(browser: Browser, start: Start) -> None:
    """Settings that did not load, simulated cards, and the links to everything else, which all lead somewhere."""
    daemon = start({}, "backends: [simulated]", ["--web.enable-lifecycle", "--web.telemetry-path=/gpu"])
    daemon.config_path.write_text("fleets: 7", encoding="utf-8")
    daemon.request("/-/reload", "POST")
    with browser.tab() as tab:
        tab.go(f"http://127.0.0.1:{daemon.port}/")
        notices = tab.evaluate("document.querySelector('.notices').innerText")
        assert "The settings were not loaded." in notices
        assert "Simulated cards." in notices
        links = tab.evaluate("[...document.querySelectorAll('nav a')].map((link) => link.getAttribute('href'))")
        assert links == ["./gpu", "./api/v1/fleets", "./-/healthy", "./-/ready"]
        assert [daemon.request(link[1:]).status for link in links] == [200] * 4
        assert tab.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].every((link) => "
            "document.getElementById(link.getAttribute('href').slice(1)))"
        )


# --- how it comes


@pytest.mark.e2e
def test_the_page_allows_nothing_from_elsewhere(browser: Browser, host: Host) -> None:
    """Its policy lets in what the exporter serves alone, and it asks for nothing else."""
    answer = host.daemon.request("/")
    assert answer.headers["content-security-policy"] == POLICY
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    with browser.tab() as tab:
        tab.go(host.url)
        tab.until("document.querySelector('main') !== null")
        assert {url.removeprefix(host.url) for url in tab.asked_for()} == {
            "",
            "assets/page.css",
            "assets/page.js",
            "assets/icon.svg",
        }


@pytest.mark.e2e
@pytest.mark.parametrize("path", ["/", "/api/v1/fleets"])
def test_gzip_is_offered_and_not_forced(host: Host, path: str) -> None:
    """A page of many fleets is long and says much twice: whoever takes gzip gets it."""
    zipped = host.daemon.request(path, headers={"Accept-Encoding": "gzip"})
    assert (zipped.headers["content-encoding"], zipped.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert b"fleet" in gzip.decompress(zipped.body)
    plain = host.daemon.request(path)
    assert "content-encoding" not in plain.headers
    assert b"fleet" in plain.body


@pytest.mark.e2e
def test_assets_come_as_what_they_are(host: Host) -> None:
    """Each asset has its type; nothing else of the folder, or above it, is served."""
    types = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
    for name, kind in types.items():
        answer = host.daemon.request(f"/assets/{name}")
        assert answer.status == 200
        assert answer.headers["content-type"].partition(";")[0] == kind
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/assets/", "/assets/x.css", "/assets/../app.py", "/assets/..%2fapp.py", "/assets/page.css/"):
        assert host.daemon.request(path).status == 404


# --- the script


@pytest.mark.e2e
def test_a_refresh_shows_new_values_and_leaves_the_rest(browser: Browser, host: Host) -> None:
    """Changed readings come by themselves, into the elements that are there: focus, scrolling and details stay."""
    with browser.tab(height=400) as tab:
        tab.go(host.url)
        tab.evaluate(
            "window.row = document.querySelector('#fleet-chat tbody tr'); window.scrollTo(0, 150);"
            "window.fold = document.querySelector('#fleet-chat details'); fold.open = true;"
            "fold.querySelector('summary').focus({preventScroll: true}); "
            "document.getElementById('all-devices').open = false"
        )
        first, second, third, last = host.cards
        host.has((first, second, dataclasses.replace(third, util=77), last))
        tab.until("document.querySelector('#fleet-chat meter').value === 77")
        assert tab.evaluate("row.isConnected && row.querySelector('meter').value === 77 && fold.isConnected")
        assert tab.evaluate("fold.open && document.activeElement === fold.querySelector('summary')")
        assert tab.evaluate("document.getElementById('all-devices').open") is False
        assert tab.evaluate("window.scrollY") == 150
        assert tab.complaints() == []


@pytest.mark.e2e
def test_fleets_that_come_and_go_keep_the_others_parts(browser: Browser, start: Start) -> None:
    """After a reload with another list of fleets each has its place, and one that was unfolded still is."""

    def settings_of(*names: str) -> str:
        fleets = [{"name": name, "runtime": "cuda", "env": {"CUDA_VISIBLE_DEVICES": "0"}} for name in names]
        return json.dumps({"backends": ["simulated"], "fleets": fleets})

    daemon = start({}, settings_of("a", "b", "c"), ["--web.enable-lifecycle"])
    with browser.tab() as tab:
        tab.go(f"http://127.0.0.1:{daemon.port}/")
        tab.evaluate("window.b = document.getElementById('fleet-b'); b.querySelector('details').open = true")
        daemon.config_path.write_text(settings_of("c", "new", "b"), encoding="utf-8")
        assert daemon.request("/-/reload", "POST").status == 200
        names = "[...document.querySelectorAll('h3')].map((name) => name.textContent).join()"
        tab.until(f"{names} === 'c,new,b'")
        assert tab.evaluate("b === document.getElementById('fleet-b') && b.querySelector('details').open")
        assert tab.evaluate("[...document.querySelectorAll('article details')].map((fold) => fold.open)") == [
            False,
            False,
            True,
        ]


@pytest.mark.e2e
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_values_of_a_silent_exporter_are_marked_as_old(browser: Browser, start: Start, how: signal.Signals) -> None:
    """Whether it hangs or has ended: the page says since when it has no answer, and its numbers are struck out."""
    daemon = start({}, "{backends: [simulated], sampling: {deadline_seconds: 1}}")
    daemon.scrape_until(lambda page: bool(page.of("gpu_info")))
    with browser.tab() as tab:
        tab.go(f"http://127.0.0.1:{daemon.port}/")
        assert tab.evaluate("document.getElementById('old').innerText") == ""
        daemon.process.send_signal(how)
        tab.until("document.getElementById('old').innerText.includes('has not answered since')")
        assert "line-through" in tab.evaluate(
            "getComputedStyle(document.querySelector('td.utilization')).textDecoration"
        )
        assert tab.evaluate("getComputedStyle(document.querySelector('meter')).visibility") == "hidden"
        if how == signal.SIGSTOP:
            daemon.process.send_signal(signal.SIGCONT)
            tab.until("document.getElementById('old').innerText === ''")
            assert tab.evaluate("getComputedStyle(document.querySelector('meter')).visibility") == "visible"


@pytest.mark.e2e
def test_a_hidden_page_asks_for_nothing_and_a_shown_one_at_once(browser: Browser, host: Host) -> None:
    """While nobody looks at it the page does not refresh; looked at again it does so without waiting its turn."""
    with browser.tab() as tab:
        tab.go(host.url)
        tab.evaluate(
            "window.asked = 0; const real = fetch; window.fetch = (...all) => { asked += 1; return real(...all); };"
            "window.away = true; Object.defineProperty(document, 'hidden', {get: () => away}); "
            "window.until = (ms) => new Promise((done) => setTimeout(done, ms))"
        )
        tab.evaluate("until(6000)")
        assert tab.evaluate("asked") == 0
        tab.evaluate("away = false; document.dispatchEvent(new Event('visibilitychange'))")
        assert tab.evaluate("asked") == 1


# --- for everybody


@pytest.mark.e2e
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing_serious(browser: Browser, host: Host, axe: str, dark: bool, width: int) -> None:
    """axe-core has nothing serious or critical to say, in light and in dark, on a phone and on a desk."""
    host.has(lines=["lost 1"])
    host.daemon.scrape_until(lambda page: page.state(physical_index="1") == "lost")
    with browser.tab(width, dark=dark) as tab:
        tab.go(host.url)
        tab.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        findings = tab.findings(axe)
        assert [each for each in findings if each["impact"] in ("serious", "critical")] == []
        assert findings == []


@pytest.mark.e2e
@pytest.mark.parametrize("width", [320, 360, 768, 1280, 2560])
def test_nothing_is_wider_than_the_window(browser: Browser, host: Host, width: int) -> None:
    """No width has the page scroll to the side, also with everything unfolded and with long names."""
    with browser.tab(width) as tab:
        tab.go(host.url)
        tab.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        over = (
            "[...document.querySelectorAll('main *')].filter((each) => !each.closest('.unseen') && "
            "each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80))"
        )
        assert tab.evaluate(over) == []
        squeezed = (
            "[...document.querySelectorAll('thead th, td.utilization, td.memory, td.temperature')]"
            ".filter((each) => getComputedStyle(each.closest('thead, tbody')).position !== 'absolute')"
            ".filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.textContent)"
        )
        assert tab.evaluate(squeezed) == []


@pytest.mark.e2e
def test_dark_is_dark_and_light_is_light(browser: Browser, host: Host) -> None:
    """The page follows what the system prefers."""
    for dark in (False, True):
        with browser.tab(dark=dark) as tab:
            tab.go(host.url)
            colour = tab.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
            assert (max(colour) < 64) if dark else (min(colour) > 192)


@pytest.mark.e2e
def test_the_keyboard_reaches_everything_in_order(browser: Browser, host: Host) -> None:
    """Tab goes through the links and folds in the order of the page; the first leads past the head."""
    with browser.tab() as tab:
        tab.go(host.url)
        wanted = tab.evaluate(
            "[...document.querySelectorAll('a, summary')].filter((each) => each.matches('summary') || "
            "!each.closest('details:not([open])')).map((each) => each.textContent)"
        )
        reached = []
        for _ in wanted:
            tab.press(*TAB)
            reached.append(tab.evaluate("document.activeElement.textContent"))
            assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        assert reached == wanted
        assert wanted[0] == "Skip to the fleets"


@pytest.mark.e2e
def test_it_has_landmarks_headings_and_captions(browser: Browser, host: Host) -> None:
    """A reader finds its way: one heading of the first level, none skipped, a caption and scopes in each table."""
    with browser.tab() as tab:
        tab.go(host.url)
        levels = tab.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((each) => Number(each.tagName[1]))")
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        assert tab.evaluate("[...document.querySelectorAll('table')].every((each) => each.caption)")
        assert tab.evaluate("[...document.querySelectorAll('th')].every((each) => each.scope)")
        assert tab.evaluate("['header', 'nav', 'main', 'footer'].every((each) => document.querySelector(each))")
        assert (
            tab.evaluate("document.querySelectorAll('[aria-live], main [role=status], main [role=alert]').length") == 0
        )


@pytest.mark.e2e
@pytest.mark.parametrize("width", [360, 1280])
def test_a_table_is_one_to_a_screen_reader(browser: Browser, host: Host, width: int) -> None:
    """On a phone too, where rows are laid out otherwise: heads of rows and columns, and cells, are what they are."""
    with browser.tab(width) as tab:
        tab.go(host.url)
        tab.send("Accessibility.enable")
        nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
        roles = Counter(node["role"]["value"] for node in nodes if not node["ignored"])
        count = tab.evaluate(
            "Object.fromEntries(['table', 'tr', 'thead th', 'tbody th', 'td']"
            ".map((each) => [each, document.querySelectorAll(each).length]))"
        )
        assert roles["table"] == count["table"]
        assert roles["row"] == count["tr"]
        assert roles["columnheader"] == count["thead th"]
        assert roles["rowheader"] == count["tbody th"]
        assert roles["cell"] + roles["gridcell"] == count["td"]


@pytest.mark.e2e
@pytest.mark.parametrize("parts", [False, True])
def test_a_large_host_is_shown(browser: Browser, start: Start, tmp_path: Path, nvml_library: Path, parts: bool) -> None:
    """Fifty fleets of eight cards, or sixteen cards of seven instances, have a row each, on a phone too."""
    fake = FakeNvml(tmp_path, nvml_library)
    cards = equal_cards(16 if parts else 8)
    if parts:
        cards = tuple(
            dataclasses.replace(card, mig=1, instances=instances(number)) for number, card in enumerate(cards)
        )
    fake.write(cards)
    fleets = (
        [{"name": "host", "runtime": "host"}] if parts else [{"name": f"job-{n}", "runtime": "host"} for n in range(50)]
    )
    daemon = start(fake.environment(), json.dumps({"fleets": fleets}))
    wanted = 16 * 8 if parts else 50 * 8
    daemon.scrape_until(lambda page: len(page.of("gpu_fleet_device_info")) == wanted)
    with browser.tab(360) as tab:
        tab.go(f"http://127.0.0.1:{daemon.port}/")
        shown = tab.evaluate(ROWS)
        assert len({(row["fleet"], row["text"]) for row in shown}) == wanted
        assert sum("memory" in row["bars"] for row in shown) == wanted
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        assert tab.complaints() == []


def instances(card: int) -> tuple[Mig, ...]:
    return tuple(
        Mig(
            index=slot,
            uuid=f"MIG-{card:08x}-0000-4000-8000-{slot:012x}",
            gi=slot + 7,
            ci=0,
            name="1g.6gb",
            total=6 << 30,
            free=slot << 30,
            used=(6 - slot) << 30,
        )
        for slot in range(7)
    )


# --- without a browser


class Text(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(html.decode("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        """What stands between the tags."""
        self.text.append(data)


def rendered(text: str) -> Text:
    return Text(page(report(hostile(text), ReloadStatus(True, 1.0)), AROUND))


PLAIN = rendered("plain")
MARKUP = (
    "<b>",
    "</td></table><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "&lt;&#60;&amp;",
    "]]>",
    "-->",
)


@given(
    st.one_of(
        st.text(st.characters(exclude_categories=()), min_size=1, max_size=150),
        st.lists(st.sampled_from(MARKUP), min_size=1, max_size=3).map("".join),
    )
)
@settings(max_examples=300, deadline=None)
def test_no_text_is_ever_markup(text: str) -> None:
    """Whatever text a driver or a process gives, the page has the elements of any other, and the text as it is."""
    found = rendered(text)
    assert found.tags == PLAIN.tags
    assert [name for _, name, _ in found.attributes] == [name for _, name, _ in PLAIN.attributes]
    assert visible(text.encode("utf-8", "backslashreplace").decode()) in "".join(found.text)


def test_nothing_stands_in_the_page_itself() -> None:
    """No style and no handler is written into the page, which its policy would not let in."""
    assert "style" not in PLAIN.tags
    assert all(not name.startswith("on") and name != "style" for _, name, _ in PLAIN.attributes)
    assert [value for tag, name, value in PLAIN.attributes if tag == "script" and name == "src"] == ["./assets/page.js"]
    assert PLAIN.tags.count("script") == 1


def test_who_never_looks_does_not_pay_for_the_page() -> None:
    """A daemon that is only scraped imports neither the page nor the report, nor what writes HTML."""
    code = "import sys, exporter.cli, exporter.web.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "exporter.web.people" in loaded
    assert not loaded & {"exporter.web.page", "exporter.web.report", "exporter.web.elements", "xml.etree.ElementTree"}
