"""A headless Chromium that tests look at pages with, over its DevTools protocol on two pipes: no port, no package."""

import json
import os
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
FLAGS += ("--disable-background-networking", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe")
LOADED = "document.documentElement?.dataset.ready === 'yes'"
WAIT = """new Promise((done, fail) => {
    const start = Date.now();
    const late = () => Date.now() - start > 60000;
    const look = () => (%s) ? done(true) : late() ? fail(new Error("not in time")) : setTimeout(look, 20);
    look();
})"""


def find_chromium() -> str | None:
    """The path of a browser; None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page in the browser, with what it has said and asked for."""

    def __init__(self, send: int, receive: Any) -> None:
        self.send, self.receive = send, receive
        self.session: str | None = None
        self.number = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers; what it tells meanwhile is taken down."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._take_down(answer)

    def _read(self) -> dict[str, Any]:
        parts = bytearray()
        while (byte := self.receive.read(1)) != b"\0":
            assert byte, "the browser has gone"
            parts += byte
        return json.loads(parts)

    def _take_down(self, event: dict[str, Any]) -> None:
        name, params = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(part.get("value", part)) for part in params["args"]))
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, page: Path | str, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Show a file or an address in a window of this size, and wait until its charts are drawn."""
        self.complaints.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait(LOADED)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Return as soon as an expression is true; fails after a minute."""
        self.evaluate(WAIT % condition)

    def press(self, key: str) -> None:
        """Press and release a key, such as `Tab` or `Enter`."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        content = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(b64decode(content))


@contextmanager
def open_browser(binary: str, profile: Path) -> Iterator[Tab]:
    """A browser with an empty profile, and one tab in it; it ends with the block."""
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()

    def place() -> None:  # it reads from 3 and writes to 4
        first, second = os.dup(from_us), os.dup(to_us)
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [binary, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=place,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        with os.fdopen(from_browser, "rb", buffering=1 << 16) as receive:
            tab = Tab(to_browser, receive)
            target = tab.call("Target.createTarget", url="about:blank")["targetId"]
            tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            yield tab
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(to_browser)
