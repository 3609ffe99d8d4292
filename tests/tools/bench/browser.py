"""A headless Chromium that opens a page, clicks and takes pictures.

It speaks the DevTools protocol through a pipe, which needs nothing but the browser itself.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)


def _moved_up(descriptor: int) -> int:
    """Return the same file under a number that the browser's own two cannot collide with."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class Browser:
    """One tab of a browser of its own, which ends with the context."""

    def __init__(self, profile: Path) -> None:
        assert FOUND is not None
        theirs_in, self._out = map(_moved_up, os.pipe())
        self._in, theirs_out = map(_moved_up, os.pipe())
        # The browser reads from descriptor 3 and writes to 4, so a shell puts the pipes there.
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, "bash", FOUND),
                *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"),
                *("--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=[theirs_in, theirs_out],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._heard, self._session = 0, b"", ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of this size."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=path.resolve().as_uri())
        while self.ask("document.readyState") != "complete":
            pass

    def ask(self, expression: str) -> Any:
        """Evaluate an expression on the page."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _place(self, selector: str) -> dict[str, float]:
        """Scroll to the first element that matches, and return its middle."""
        place: dict[str, float] | None = self.ask(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'center', behavior: 'instant'});"
            "return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {"
            "const box = found.getBoundingClientRect();"
            "done({x: box.x + box.width / 2, y: box.y + box.height / 2}); }))); })()"
        )
        assert place is not None, selector
        return place

    def hover(self, selector: str) -> None:
        """Move the pointer over an element."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", **self._place(selector))

    def click(self, selector: str) -> None:
        """Click on an element."""
        button = {**self._place(selector), "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, **button)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save a picture of the page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something and wait for its answer."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._heard:
            content = os.read(self._in, 1 << 16)
            assert content, "the browser has ended"
            self._heard += content
        message, _, self._heard = self._heard.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
