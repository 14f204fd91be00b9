"""A real browser for the pages: Debian's chromium, spoken to over two pipes, so that no other package is needed."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Makes the pipes descriptors 3 and 4, where chromium looks for them, and becomes chromium.
LAUNCH = (
    "import fcntl, os, sys\n"
    "ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]\n"
    "for number, end in zip((3, 4), ends):\n"
    "    os.dup2(end, number)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """Chromium with one tab: open a file, look at it, press keys, move the mouse."""

    def __init__(self, profile: Path):
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(to_browser), str(from_browser), "chromium", *FLAGS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers, self._unread, self._session = itertools.count(1), b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "DOM", "CSS"):
            self.call(f"{domain}.enable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            message, found, rest = self._unread.partition(b"\0")
            if found:
                self._unread = rest
                yield json.loads(message)
                continue
            if not select.select([self._read], [], [], 60)[0]:
                raise TimeoutError("chromium has not answered for a minute")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise ConnectionError(f"chromium ended with {self.process.wait()}")
            self._unread += data

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol and wait for its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = next(found for found in self._messages() if found.get("id") == number)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, *, width: int, dark: bool, scripts: bool = True) -> None:
        """Load the page at `path` in a window `width` pixels wide."""
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        next(found for found in self._messages() if found.get("method") == "Page.loadEventFired")

    def run(self, expression: str) -> Any:
        """The value of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys as a user does: what has the focus gets them."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        for key in keys:
            event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
            self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def hover(self, selector: str) -> None:
        """Move the mouse over the first element that `selector` finds."""
        middle = """(selector) => {
            const found = document.querySelector(selector);
            found.scrollIntoView({block: "center"});
            const box = found.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
        x, y = self.run(f"({middle})({json.dumps(selector)})")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """Write the whole page to `path` as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser that this started."""
        os.close(self._write)
        self.process.terminate()
        self.process.wait(timeout=30)
        os.close(self._read)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium")
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
