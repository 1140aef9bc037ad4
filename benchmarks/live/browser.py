"""A headless Chromium, driven over its DevTools protocol: as much of it as looking at a page takes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 120.0
ANSWER_S = 60.0


def find() -> str | None:
    """The path of a browser of this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class ScriptFailed(Exception):
    """A script in the page has thrown."""


class Devtools:
    """One connection to a browser or to a page of it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """What the browser has complained of, a policy's refusals included."""

    def call(self, method: str, *, within_s: float = ANSWER_S, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol, and its result. Raises ``TimeoutError`` if none comes ``within_s`` seconds."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            told = json.loads(self._socket.recv(timeout=within_s))
            if told.get("id") == number:
                if "error" in told:
                    raise ScriptFailed(f"{method}: {told['error']['message']}")
                result: dict[str, Any] = told["result"]
                return result
            self._note(told)

    def _note(self, told: dict[str, Any]) -> None:
        of = told.get("params", {})
        match told.get("method"):
            case "Runtime.exceptionThrown":
                details = of["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if of["entry"]["level"] == "error":
                self.problems.append(f"{of['entry']['text']} {of['entry'].get('url', '')}".strip())
            case "Runtime.consoleAPICalled" if of["type"] == "error":
                self.problems.append(str(of["args"]))


class Tab(Devtools):
    """One page."""

    def __init__(self, socket: ClientConnection) -> None:
        super().__init__(socket)
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def run(self, script: str, within_s: float = ANSWER_S) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        told = self.call(
            "Runtime.evaluate", within_s=within_s, expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in told:
            raise ScriptFailed(told["exceptionDetails"].get("exception", {}).get("description", "no description"))
        return told["result"].get("value")

    def until(self, script: str, seconds: float = 60.0) -> Any:
        """The value of an expression once it is true. Raises ``ScriptFailed`` if it is not in time."""
        check = f"(() => {{ try {{ return ({script}); }} catch {{ return null; }} }})()"
        promise = f"""new Promise((done) => {{
            const end = performance.now() + {seconds * 1000};
            const look = () => {{ const v = {check}; v || performance.now() > end ? done(v) : setTimeout(look, 25); }};
            look();
        }})"""
        found = self.run(promise, seconds + ANSWER_S)
        if not found:
            raise ScriptFailed(f"not within {seconds} s: {script}; the browser says {self.problems}")
        return found

    def open(self, url: str) -> None:
        """Goes there."""
        self.call("Page.navigate", url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def press(self, key: str, *, text: str = "", shift: bool = False) -> None:
        """A key by name, as a keyboard sends it."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowDown": 40, "ArrowUp": 38}
        same: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        same["modifiers"] = 8 if shift else 0
        text = text or {"Enter": "\r", " ": " "}.get(key, "")
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **same)
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Of the window, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def prefer(self, **features: str) -> None:
        """Media features such as prefers_color_scheme="dark"."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=told)

    def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


class Browser:
    """A running browser, by the address of its DevTools."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        """A new page in a context of its own: it has no storage of another one."""
        with _connected(self._address) as socket:
            browser = Devtools(socket)
            context = browser.call("Target.createBrowserContext")["browserContextId"]
            target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
            try:
                with _connected(f"{self._address.split('/devtools/')[0]}/devtools/page/{target}") as to_page:
                    yield Tab(to_page)
            finally:
                browser.call("Target.disposeBrowserContext", browserContextId=context)


def _connected(address: str) -> AbstractContextManager[ClientConnection]:
    return connect(address, max_size=None, open_timeout=START_S, proxy=None)


@contextmanager
def running(path: str) -> Iterator[Browser]:
    """A browser without a window, a profile or a network, until the end of the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [path, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", *_QUIET]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # it has none for root
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            try:
                yield Browser(_address(process))
            finally:
                process.terminate()
                try:
                    process.communicate(timeout=START_S)
                except subprocess.TimeoutExpired:
                    process.kill()


_QUIET = (
    *("--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--disable-extensions", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"),
    *("--hide-scrollbars", "--no-proxy-server", "--force-color-profile=srgb", "--disable-breakpad"),
)


def _address(process: subprocess.Popen[bytes]) -> str:
    """Where its DevTools listen, as it says itself."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line.decode(errors="replace"))
        if "DevTools listening on " in said[-1]:
            return said[-1].split("DevTools listening on ")[1].strip()
    raise OSError(f"the browser has ended: {''.join(said)[-2000:]}")
