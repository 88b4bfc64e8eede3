"""A headless Chromium, controlled by its DevTools protocol over a pipe: for pictures of real pages in real time.

with Browser(chromium) as browser:
    page = browser.open("http://127.0.0.1:9402/", 1150, 1080, dark=True)
    time.sleep(30)
    png = page.picture()
    page.close()
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
STOP_S = 20.0
_CHUNK = 1 << 16
# No sandbox: it needs rights that root in a container has not. No /dev/shm: a renderer that ends in the middle of
# making a file there leaves it for good. The rest keeps Chromium from asking other hosts.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class BrowserFailed(RuntimeError):
    """The browser could not be started, or refused what it was asked."""


def find() -> str:
    """The path of a Chromium. Raises BrowserFailed where there is none."""
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise BrowserFailed(f"no Chromium on PATH ({', '.join(NAMES)}): install one (on Debian: chromium)")


class Browser:
    """Has a profile and a folder of temporary files of its own, which are removed at the end."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="gm-browser-")
        told, self._tell = os.pipe()
        self._hear, heard = os.pipe()
        command = [path, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{told} 4>&{heard}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(told, heard),
            process_group=0,
            env=os.environ | {"TMPDIR": self._profile},
        )
        os.close(told)
        os.close(heard)
        self._asked = 0
        self._read = b""
        self._loaded: set[str] = set()  # which navigations have ended
        try:
            self.ask("Browser.getVersion")
        except BrowserFailed:
            self.close()
            raise BrowserFailed(f"{path} did not start") from None

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a DevTools method and wait for its result. Raises BrowserFailed."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        try:
            while data:
                data = data[os.write(self._tell, data) :]
        except BrokenPipeError:
            raise BrowserFailed("the browser is gone") from None
        while (answer := self._next()).get("id") != self._asked:
            self._happened(answer)
        if "error" in answer:
            raise BrowserFailed(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, width: int, height: int, *, dark: bool = False) -> Page:
        """A page in a window of that size in pixels, for an eye that prefers a dark screen or a light one. Raises
        BrowserFailed if `url` can't be had."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session: str = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask(
            "Emulation.setDeviceMetricsOverride", session, width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        page = Page(self, session, target)
        page.prefer(dark)
        self.ask("Page.enable", session)
        self.ask("Page.setLifecycleEventsEnabled", session, enabled=True)
        begun = self.ask("Page.navigate", session, url=url)
        if problem := begun.get("errorText"):
            raise BrowserFailed(f"{url}: {problem}")
        while begun["loaderId"] not in self._loaded:
            self._happened(self._next())
        return page

    def close(self) -> None:
        """End it. Idempotent."""
        if self._process.returncode is None:
            os.close(self._tell)  # which it takes as a request to leave
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._hear)
            shutil.rmtree(self._profile, ignore_errors=True)

    def _happened(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Page.lifecycleEvent" and event["params"]["name"] == "load":
            self._loaded.add(event["params"]["loaderId"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            data = os.read(self._hear, _CHUNK)
            if not data:
                raise BrowserFailed("the browser is gone")
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


# Keys that are no letters: their code, and the character they type.
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}


class Page:
    """One tab, until it or its browser is closed."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises BrowserFailed."""
        found = self._browser.ask(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserFailed(f"{expression}: {found['exceptionDetails'].get('exception', {}).get('description')}")
        return found["result"].get("value")

    def prefer(self, dark: bool) -> None:
        """Have the reader prefer a dark screen, or a light one."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._browser.ask("Emulation.setEmulatedMedia", self._session, features=[scheme])

    def point(self, x: float, y: float) -> None:
        """Move the mouse there, in pixels of the window."""
        self._browser.ask("Input.dispatchMouseEvent", self._session, type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key and let it go: a letter, or one of `KEYS`. The page has dealt with it on return."""
        code, character = KEYS.get(key, (ord(key.upper()[0]), key))
        said = {"key": key, "windowsVirtualKeyCode": code}
        down = {"type": "keyDown", "text": character} if character else {"type": "rawKeyDown"}
        for event in (down, {"type": "keyUp"}):
            self._browser.ask("Input.dispatchKeyEvent", self._session, **said, **event)

    def cut_off(self) -> None:
        """Have every request fail from now on, as without a network."""
        self._browser.ask("Network.enable", self._session)
        self._browser.ask(
            "Network.emulateNetworkConditions", self._session, offline=True, latency=0, downloadThroughput=-1,
            uploadThroughput=-1,
        )  # fmt: skip

    def picture(self, *, whole: bool = False) -> bytes:
        """What it shows now, as PNG. whole: with what one has to scroll down to."""
        asked: dict[str, Any] = {"format": "png"}
        if whole:
            size = self._browser.ask("Page.getLayoutMetrics", self._session)["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            asked |= {"captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(self._browser.ask("Page.captureScreenshot", self._session, **asked)["data"])

    def close(self) -> None:
        """End the tab."""
        self._browser.ask("Target.closeTarget", targetId=self._target)


def writer(directory: Path) -> Callable[[str, bytes], None]:
    """What writes a picture to NAME.png there, and says so."""

    def write(name: str, png: bytes) -> None:
        (directory / f"{name}.png").write_bytes(png)
        print(f"{directory / name}.png: {len(png)} bytes", flush=True)

    return write
