"""Takes the pictures of the exporter's page, in the demonstration while a card hangs: ``make pictures``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests import queries
from tests.browser import Browser
from tests.harness import Daemon

DEMO = (queries.ROOT / "docs" / "demo.yaml").read_text(encoding="utf-8")


class View(NamedTuple):
    """Who looks at it: a window's width and height in pixels, and which colours they like."""

    name: str
    width: int
    height: int
    dark: bool = False


VIEWS = (View("page", 1280, 1000), View("page-dark", 1280, 1000, dark=True), View("page-phone", 390, 1000))


def main() -> None:
    """Takes all of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=queries.ROOT / "docs" / "pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work, Daemon(Path(work), {}, DEMO, ()) as daemon, Browser() as browser:
        daemon.scrape_until(lambda page: page.state(physical_index="1") == "hung", within=90)
        for view in VIEWS:
            with browser.tab(view.width, view.height, dark=view.dark) as tab:
                tab.go(f"http://127.0.0.1:{daemon.port}/")
                tab.picture(folder / f"{view.name}.png", whole=False)


if __name__ == "__main__":
    main()
