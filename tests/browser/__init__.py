"""A real Chromium, told what to do over the pipe of its DevTools protocol, and axe-core inside it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from tests.harness import tool

SOURCE = Path(__file__).parent
# The protocol is spoken on the descriptors 3 and 4, which this gives the program that it becomes.
_WITH_PIPES = (
    "import os, sys; a, b = map(int, sys.argv[1:3]); os.dup2(a, 13); os.dup2(b, 14); os.dup2(13, 3); os.dup2(14, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_PATIENCE_SECONDS = 30.0


class Browser:
    """One Chromium with a profile of its own; closed when left."""

    def __init__(self) -> None:
        chromium = tool("chromium", "chromium")
        self._profile = tempfile.mkdtemp(prefix="chromium")
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
        more = ("--disable-component-update", "--disable-sync", "--remote-debugging-pipe", "--hide-scrollbars")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [sys.executable, "-c", _WITH_PIPES, str(theirs_in), str(theirs_out), chromium, *flags, *more]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}"], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """A command's result; what happens meanwhile is put into ``events``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            got = self._message(until)
            if got.get("id") == self._number:
                assert "error" not in got, (method, parameters, got["error"])
                result: dict[str, Any] = got["result"]
                return result
            if "method" in got:
                self.events.append(got)

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._in, 1 << 20) if ready else b""
            assert piece, "Chromium does not answer, or has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    @contextlib.contextmanager
    def tab(self, width: int = 1280, height: int = 900, *, dark: bool = False, scripts: bool = True) -> Iterator[Tab]:
        """A tab with a window of that size, without cookies or cache of others."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.send(f"{domain}.enable")
        tab.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.send("Emulation.setEmulatedMedia", features=[scheme])
        if not scripts:
            tab.send("Emulation.setScriptExecutionDisabled", value=True)
        try:
            yield tab
        finally:
            self.send("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """A tab: what it shows, and what somebody at it would do."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the tab alone."""
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Another size of window."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def go(self, url: str) -> None:
        """To an address, until it has loaded."""
        self._browser.events.clear()
        self.send("Page.navigate", url=url)
        self.wait(lambda: any(event["method"] == "Page.loadEventFired" for event in self._browser.events), url)

    def wait(self, holds: Any, what: str, within: float = _PATIENCE_SECONDS) -> None:
        """Until it holds."""
        until = time.monotonic() + within
        while not holds():
            assert time.monotonic() < until, f"never so: {what}"
            self.send("Runtime.evaluate", expression="0")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise's is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str, within: float = _PATIENCE_SECONDS) -> None:
        """Until the expression is true."""
        self.wait(lambda: self.evaluate(expression), expression, within)

    def press(self, key: str, code: int) -> None:
        """A key, down and up; ``code`` is its Windows virtual key code."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def complaints(self) -> list[Any]:
        """What the browser has to complain of: what the policy forbids, exceptions, what was not found, dialogs."""
        wrong = {"Page.javascriptDialogOpening", "Runtime.exceptionThrown"}
        return [
            event
            for event in self._browser.events
            if event["method"] in wrong
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("warning", "error"))
        ]

    def asked_for(self) -> list[str]:
        """The addresses that it has asked for."""
        requests = (event for event in self._browser.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in requests]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """What it looks like, into a PNG file."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def findings(self, axe: str) -> list[Mapping[str, Any]]:
        """What axe-core finds wrong on the page, by its rules and the nodes that break them."""
        self.send("Runtime.evaluate", expression=axe)
        found = self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations.map("
            "({id, impact, help, nodes}) => ({id, impact, help, nodes: nodes.map(({html, failureSummary}) => "
            "[html, failureSummary])})))"
        )
        violations: list[Mapping[str, Any]] = found
        return violations


def axe_core(folder: Path) -> str:
    """axe-core's source. Needs npm and the npm registry."""
    shutil.copy(SOURCE / "package.json", folder)
    npm = [tool("npm", "npm"), "--prefix", str(folder)]
    subprocess.run([*npm, "install", "--ignore-scripts", "--no-audit", "--no-fund"], check=True, capture_output=True)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")
