"""The page for people: a report as HTML that says everything without a script, in words before colours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import quote
from xml.etree.ElementTree import Element

from msgspec import UNSET

from exporter.reports import shortened
from exporter.web import cards
from exporter.web.elements import Node, document, el, with_code
from exporter.web.report import BackendReport, FleetReport, MaskLayer, RefusedMask, Report, RuntimeReport

EVIDENCE_MEANINGS = {
    "proven": "follows from the masks and the inventory alone",
    "probed": "what the driver itself answered, in a process with the workload's masks",
    "assumed": "documentation leaves it open, and every report agrees",
}
# From so many on there is a list of fleets to jump to, and from so many rows on a fleet has the page's whole width.
_MANY_FLEETS, _MANY_ROWS = 9, 17
# More cards than this are shown when asked for: the fleets come first.
_MANY_CARDS = 16


class Surroundings(NamedTuple):
    """What the page says of where it is: its neighbours, and how long an answer may take."""

    telemetry_path: str
    api_path: str
    deadline_seconds: float


def page(facts: Report, around: Surroundings) -> bytes:
    """The page of one cycle. Its links are relative, for proxies that have it elsewhere than at ``/``."""
    return document(
        el(
            "html",
            el(
                "head",
                el("meta", charset="utf-8"),
                el("meta", name="viewport", content="width=device-width, initial-scale=1"),
                el("meta", name="color-scheme", content="light dark"),
                el("title", "GPU fleet exporter"),
                el("link", rel="icon", href="./assets/icon.svg"),
                el("link", rel="stylesheet", href="./assets/page.css"),
                el("script", src="./assets/page.js", defer="defer"),
            ),
            el("body", _header(facts, around), _main(facts, around), _footer()),
            lang="en",
            data_version=facts.version,
        )
    )


def _header(facts: Report, around: Surroundings) -> Element:
    links = {
        "Metrics": around.telemetry_path,
        "JSON": around.api_path,
        "Health": "/-/healthy",
        "Readiness": "/-/ready",
    }
    return el(
        "header",
        el("a", "Skip to the fleets", href="#fleets", class_="skip"),
        el("h1", "GPU fleet exporter ", el("small", facts.version)),
        el(
            "nav",
            el("ul", *(el("li", el("a", text, href=f".{path}")) for text, path in links.items())),
            aria_label="Other pages",
        ),
        el("p", id="old", role="status"),
    )


def _footer() -> Element:
    return el(
        "footer",
        el("noscript", el("p", "Without scripts this page stands still: reload it for current values.")),
        el(
            "p",
            "Documentation: ",
            el("code", "man gpu-fleet-exporter"),
            ", and README.md with the folder docs where the exporter is installed.",
        ),
    )


def _main(facts: Report, around: Surroundings) -> Element:
    return el(
        "main",
        _summary(facts),
        _notices(facts),
        _fleets(facts),
        _spare(facts),
        _all_cards(facts),
        _backends(facts),
        data_deadline=f"{around.deadline_seconds:g}",
    )


def _summary(facts: Report) -> Element:
    states = Counter(str(card.state) for card in facts.devices if card.state not in ("ok", UNSET))
    refused = sum(not runtime.inverted for fleet in facts.fleets for runtime in fleet.runtimes)
    down = sum(not backend.up for backend in facts.backends)
    return el(
        "dl",
        *_count("Fleets", len(facts.fleets), {"refused": refused}),
        *_count("Devices", len(facts.devices), states),
        *_count("Backends", len(facts.backends), {"down": down}),
        el("div", el("dt", "Read at"), el("dd", _time(facts))),
        class_="summary",
    )


def _time(facts: Report) -> Node:
    if facts.asked_timestamp_seconds is UNSET:
        return "no backend answers"
    read = datetime.fromtimestamp(facts.asked_timestamp_seconds, UTC)
    return el("time", f"{read:%H:%M:%S} UTC", datetime=read.isoformat(timespec="seconds"))


def _count(name: str, number: int, wrong: dict[str, int]) -> Iterator[Node]:
    troubles = (badge for word, count in wrong.items() if count for badge in (" ", _badge(word, f"{count} {word}")))
    yield el("div", el("dt", name), el("dd", str(number), *troubles))


def _badge(kind: str, text: str = "") -> Element:
    return el("span", text or kind, class_=f"badge {kind}")


def _notices(facts: Report) -> Node:
    notices = list(_notice_items(facts))
    if not notices:
        return None
    return el(
        "section", el("h2", "Notices", class_="unseen"), el("ul", *notices), class_="notices", aria_label="Notices"
    )


def _notice_items(facts: Report) -> Iterator[Node]:
    if not facts.settings.last_reload_successful:
        yield el(
            "li",
            el("strong", "The settings were not loaded. "),
            "The last attempt failed, and the earlier settings hold. The log says what is wrong, as does ",
            el("code", "gpu-fleet-exporter check-config"),
            ".",
            class_="bad",
        )
    if facts.fleets_left_out:
        yield el(
            "li",
            el("strong", f"{facts.fleets_left_out} fleets are left out. "),
            "More live fleets were found than mapping.max_fleets lets in, or some have another's name.",
        )
    for backend in facts.backends:
        if backend.up and not backend.whole:
            yield el(
                "li",
                el("strong", f"The inventory of {backend.vendor} is not whole. "),
                "A card that the library counts could not be identified.",
            )
    if any(device.vendor == "simulated" for device in facts.devices):
        yield el("li", el("strong", "Simulated cards. "), "They exist for demonstrations, and so do their readings.")


def _fleets(facts: Report) -> Element:
    return el(
        "section",
        el("h2", "Fleets", id="fleets", tabindex="-1"),
        _index(facts.fleets) if len(facts.fleets) >= _MANY_FLEETS else None,
        el("p", "There is no fleet.") if not facts.fleets else None,
        el("div", *map(_fleet, facts.fleets), class_="fleets"),
        aria_labelledby="fleets",
    )


def _index(fleets: Iterable[FleetReport]) -> Element:
    items = (
        el(
            "li",
            el("a", shortened(fleet.name), href=f"#{fleet_id(fleet.name)}"),
            *(() if all(runtime.inverted for runtime in fleet.runtimes) else (" ", _badge("refused"))),
        )
        for fleet in fleets
    )
    return el("nav", el("ul", *items), aria_label="Fleets", class_="index")


def fleet_id(name: str) -> str:
    """The id of a fleet's part of the page."""
    return f"fleet-{quote(name, safe='')}"


def _fleet(fleet: FleetReport) -> Element:
    own = fleet_id(fleet.name)
    rows = max((len(runtime.devices) for runtime in fleet.runtimes), default=0)
    return el(
        "article",
        el("h3", shortened(fleet.name), id=f"{own}-name"),
        *(_runtime(runtime, fleet, f"{own}-{runtime.runtime}") for runtime in fleet.runtimes),
        id=own,
        class_="wide" if rows >= _MANY_ROWS else None,
        aria_labelledby=f"{own}-name",
    )


def _runtime(runtime: RuntimeReport, fleet: FleetReport, own: str) -> Element:
    name = f"{shortened(fleet.name)} ({runtime.runtime})"
    return el(
        "div",
        el("p", el("b", runtime.runtime), *_masks_set(runtime), class_="masks"),
        *(_inverted(runtime, name) if runtime.refusal is UNSET else _refused(runtime.refusal)),
        _how(runtime, fleet, own),
        class_="runtime",
        id=own,
    )


def _masks_set(runtime: RuntimeReport) -> Iterator[Node]:
    if runtime.runtime == "host":
        yield "without masks, by the numbers of the vendor's tool"
    for mask in runtime.masks:
        if mask.text is not UNSET:
            yield " "
            yield el("code", f"{mask.variable}={shortened(str(mask.text))}")


def _inverted(runtime: RuntimeReport, name: str) -> Iterator[Node]:
    if not runtime.devices:
        yield el("p", "The masks leave no device visible.")
        return
    yield cards.table(f"Devices of {name}", "Index", (cards.bound_row(card) for card in runtime.devices))
    grades = dict.fromkeys(card.evidence for card in runtime.devices)
    yield el(
        "p",
        *(part for grade in grades for part in (_badge(grade), f" {EVIDENCE_MEANINGS[grade]}. ")),
        class_="evidence",
    )


def _refused(refusal: RefusedMask) -> Iterator[Node]:
    yield el("p", _badge("refused"), " because ", refusal.meaning, ".", class_="why")
    yield el(
        "dl",
        el("dt", "Found"),
        el("dd", shortened(refusal.detail)),
        el("dt", "What to do"),
        el("dd", *with_code(refusal.advice)),
        el("dt", "Where to look"),
        el("dd", *with_code(refusal.check)),
        el("dt", "Code"),
        el("dd", el("code", refusal.code)),
        class_="facts",
    )


def _how(runtime: RuntimeReport, fleet: FleetReport, own: str) -> Node:
    sentences = [*fleet.seen, *runtime.rests_on]
    if not sentences and not runtime.masks:
        return None
    return el(
        "details",
        el("summary", "How this is known", el("span", f" of {shortened(fleet.name)}", class_="unseen")),
        el(
            "ul",
            *(el("li", *_layer(mask)) for mask in runtime.masks),
            *(el("li", shortened(sentence)) for sentence in sentences),
        ),
        id=f"{own}-how",
    )


def _layer(mask: MaskLayer) -> Iterator[Node]:
    yield el("code", mask.variable)
    yield " is not set: " if mask.text is UNSET else ": "
    yield "refused here" if mask.left is UNSET else f"{mask.left} left"
    if mask.stopped:
        yield f"; {shortened(mask.stopped)}"


def _spare(facts: Report) -> Node:
    spare = [card for card in facts.devices if not card.used_by]
    if not spare:
        return None
    rows = (cards.host_row(card, {}) for card in spare)
    return el(
        "section",
        el("h2", "Outside every fleet", id="spare"),
        cards.table("Devices that no fleet has", "GPU", rows),
        class_="panel",
        aria_labelledby="spare",
    )


def _all_cards(facts: Report) -> Node:
    if not facts.devices:
        return None
    links = {fleet.name: f"#{fleet_id(fleet.name)}" for fleet in facts.fleets}
    rows = (cards.host_row(card, links) for card in facts.devices)
    return el(
        "section",
        el("h2", "This host's devices", id="devices"),
        el(
            "details",
            el("summary", f"All {len(facts.devices)}, with the fleets that have them"),
            cards.table("Devices of this host", "GPU", rows),
            id="all-devices",
            open="open" if len(facts.devices) <= _MANY_CARDS else None,
        ),
        class_="panel",
        aria_labelledby="devices",
    )


def _backends(facts: Report) -> Element:
    heads = (el("th", name, scope="col") for name in ("Backend", "State", "Faults so far"))
    table = el(
        "table",
        el("caption", "What reads each vendor's devices", class_="unseen"),
        el("thead", el("tr", *heads)),
        el("tbody", *map(_backend, facts.backends)),
        class_="backends",
    )
    return el(
        "section",
        el("h2", "Backends", id="backends"),
        table if facts.backends else el("p", "This host has no GPU that is known here, and the settings name none."),
        class_="panel",
        aria_labelledby="backends",
    )


def _backend(backend: BackendReport) -> Element:
    fault = backend.fault
    said = () if fault is UNSET else (el("p", el("b", fault.reason), f": {shortened(fault.detail)}"),)
    hints = (el("p", el("b", "Hint"), f": {hint.text}") for hint in backend.hints)
    found, expected = backend.cards_found, backend.cards_expected
    missing = expected is not UNSET and found < expected
    counts = (el("li", f"{reason} {count}") for reason, count in backend.faults_total.items())
    return el(
        "tr",
        el(
            "th",
            backend.vendor,
            el("small", f"driver {backend.driver_version}") if backend.driver_version else None,
            scope="row",
        ),
        el(
            "td",
            _badge("up" if backend.up else "down"),
            el("p", el("b", f"{found} of {expected}"), " expected cards answer or sleep") if missing else None,
            *said,
            *hints,
        ),
        el("td", el("ul", *counts) if backend.faults_total else el("span", "none", class_="quiet")),
        id=f"backend-{quote(backend.vendor, safe='')}",
    )
