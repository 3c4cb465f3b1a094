"""A headless Chromium for tests, spoken to over a pair of pipes: nothing is downloaded and no port is opened."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The first of `NAMES` that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """One tab; `--remote-debugging-pipe` reads JSON from descriptor 3 and writes it to 4, each message ended by NUL."""

    def __init__(self, write: IO[bytes], read: IO[bytes]) -> None:
        self._write, self._read = write, read
        self._count, self._rest, self._session = 0, b"", None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read.fileno(), 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        got: dict[str, Any] = json.loads(message)
        if got.get("method") == "Network.requestWillBeSent":
            self.requests.append(got["params"]["request"]["url"])
        if got.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(got["params"]["exceptionDetails"]))
        return got

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends one command and waits for its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (got := self._message()).get("id") != self._count:
            pass
        assert "error" not in got, got
        answer: dict[str, Any] = got["result"]
        return answer

    def open(self, path: Path) -> None:
        """Loads a file and waits until it is there."""
        self.call("Page.navigate", url=path.as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is awaited."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        self.run(
            "new Promise(done => { const look = () => { if ("
            + condition
            + ") done(true); else setTimeout(look, 10); };"
            " look(); })"
        )

    def key(self, key: str, modifiers: int = 0) -> None:
        """Presses a key where the focus is; modifiers: 8 is shift."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, " ": 32, "Tab": 9, "Escape": 27}
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes[key], modifiers=modifiers
            )

    def hover(self, x: float, y: float) -> None:
        """Moves the mouse there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Moves the mouse there and presses its button."""
        self.hover(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def centre(self, element: str) -> tuple[float, float]:
        """Middle of the first box of an element, given as an expression, scrolled into view."""
        box = "(e => { e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0]; return "
        x, y = self.run(box + f"[r.left + r.width / 2, r.top + r.height / 2] }})({element})")
        return x, y

    def dark(self, on: bool) -> None:
        """Whether the reader prefers dark pages."""
        value = "dark" if on else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def screenshot(self) -> bytes:
        """What is to be seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browser(profile: Path, size: tuple[int, int] = (1200, 800)) -> Iterator[Page]:
    """A browser with one tab, ended with the block."""
    chromium = find_chromium()
    assert chromium is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    place = (
        "import fcntl, os, sys; a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
        "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
    )
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        f"--window-size={size[0]},{size[1]}",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", place, str(theirs_in), str(theirs_out), chromium, *options],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    with os.fdopen(ours_out, "wb") as write, os.fdopen(ours_in, "rb") as read:
        try:
            yield Page(write, read)
        finally:
            process.terminate()
            process.wait()
