"""The documents: what they link to is there, down to the heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import metrics_page, migration_page
from tests.metrics_page import anchor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE = {"metrics.md": metrics_page.page, "migration.md": migration_page.page}
CODE = re.compile(r"```.*?```|<!--.*?-->", re.DOTALL)


def text_of(path: Path) -> str:
    """The page without its code; one that is made as it is made now."""
    whole = MADE[path.name]() if path.name in MADE else path.read_text(encoding="utf-8")
    return CODE.sub("", whole)


def anchors(path: Path) -> set[str]:
    """What a link can name in a page: its headings, a repeated one with a number."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", text_of(path), re.MULTILINE):
        name = anchor(re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading))
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{number}" if number else name for name, most in found.items() for number in range(most + 1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file of the project, and to a heading of it where the link names one."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            continue
        path, _, place = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not place or place in anchors(target), link


def test_the_readme_names_every_page() -> None:
    """Each page of docs/ is linked from the README, or from a page that is."""
    known, seen = {"README.md"}, set[str]()
    while known - seen:
        name = (known - seen).pop()
        seen.add(name)
        page = ROOT / name if name == "README.md" else ROOT / "docs" / name
        known |= set(re.findall(r"\]\((?:docs/)?([a-z-]+\.md)", text_of(page)))
    assert {page.name for page in PAGES} <= seen
