"""A real browser for tests: chromium without a window, driven through a pipe by its own protocol."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--hide-scrollbars", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 30.0
"""Seconds that an answer may take on a busy machine."""


class SilentError(Exception):
    """The browser has ended, or does not answer in time."""


class Browser:
    """One page of a running browser, with every request, console line and exception that it had."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1200, high: int = 900, dark: bool = False) -> None:
        """Loads a file and waits for it; what was noted of the page before is forgotten."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=high, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self.requests, self.complaints, self._loaded = [], [], False
        self._call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + PATIENCE
        while not self._loaded:
            self._take(self._message(end))

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element, which is scrolled into view."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Moves the pointer to the middle of an element."""
        x, y = self.middle(selector)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is, once it is in view."""
        found = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center', inline: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return found[0], found[1]

    def press(self, key: str, text: str = "") -> None:
        """A key, down and up, where the focus is."""
        code = {"Enter": 13, "ArrowRight": 39}.get(key, 0)
        down = {"type": "keyDown", "key": key, "windowsVirtualKeyCode": code, **({"text": text} if text else {})}
        self._call("Input.dispatchKeyEvent", **down)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def picture(self, target: Path) -> None:
        """What is to be seen, as a PNG."""
        target.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while True:
            answer = self._message(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _message(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._back, 1 << 20) if ready else b""
            if not piece:
                raise SilentError("the browser does not answer")
            self._rest += piece
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _take(self, message: dict[str, Any]) -> None:
        """Notes an event."""
        method, about = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(about["exceptionDetails"].get("exception", about["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{about['type']}: {about['args']}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"{about['entry']['level']}: {about['entry']['text']}")


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """A browser; a test that asks for one is skipped where there is none."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("no chromium is installed: pages and pictures are not opened in a browser")
    ours = os.pipe(), os.pipe()  # to the browser, and back
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (ours[0][0], ours[1][1])]
    for end in (ours[0][0], ours[1][1]):
        os.close(end)

    def wire() -> None:  # the browser reads descriptor 3 and writes 4
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    with tempfile.TemporaryDirectory(prefix="browser", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False,
            preexec_fn=wire,  # noqa: PLW1509 (no other thread runs in a test)
        )  # fmt: skip
        for end in theirs:
            os.close(end)
        try:
            try:
                browser = Browser(ours[0][1], ours[1][0])
            except (SilentError, BrokenPipeError):  # a stub that asks for a package, or a machine that it cannot run on
                pytest.skip(f"{program} is installed but does not start: nothing is opened in a browser")
            yield browser
        finally:
            os.close(ours[0][1])
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours[1][0])
