"""A real browser without a screen, driven by its own debugging protocol over two pipes: nothing else is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = "no Chromium on this machine (apt-get install chromium)"
PATIENCE_S = 120.0


_BEGIN = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, with the pipes where it looks for them."""


class Browser:
    """One page. `said` collects what it complained of: messages on the console, errors, requests that failed."""

    def __init__(self, directory: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()  # what it reads, what it writes
        words = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        words += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={directory}", "about:blank"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(ours[0]), str(theirs[1]), *words],
                pass_fds=(ours[0], theirs[1]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "HOME": str(directory), "TZ": "UTC"},
            )
        except BaseException:
            for end in (*ours, *theirs):
                os.close(end)
            raise
        os.close(ours[0])
        os.close(theirs[1])
        self._out, self._in = ours[1], theirs[0]
        self._left, self._number, self._session = b"", 0, None
        self.said: list[str] = []
        self.answers: dict[str, int] = {}  # status, by address
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    # driving

    def open(self, address: str, *, token: str = "") -> None:
        if token:
            self._call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Bearer {token}"})
        self._call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """What an expression is."""
        done = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise AssertionError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def until(self, script: str) -> None:
        """Look until an expression is true."""
        end = time.monotonic() + PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < end, f"it never held: {script}; the page says {self.said}"
            self.run("new Promise(done => setTimeout(done, 50))")

    def settle(self) -> None:
        """Until what was changed is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str, code: int = 0, *, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            held = {"text": text} if text and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **held)

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def shot(self, path: Path, *, whole: bool = True) -> None:
        made = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(made["data"]))

    # the protocol: messages with a NUL behind each

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        asked = {"id": number, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        message = json.dumps(asked).encode() + b"\0"
        while message:
            message = message[os.write(self._out, message) :]
        end = time.monotonic() + PATIENCE_S
        while True:
            told = self._next(end)
            if told.get("id") == number:
                if "error" in told:
                    raise AssertionError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result
            self._hear(told.get("method", ""), told.get("params", {}))

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser has ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        heard: dict[str, Callable[[], object]] = {
            "Runtime.consoleAPICalled": lambda: self.said.append(f"console: {params['args']}"),
            "Runtime.exceptionThrown": lambda: self.said.append(f"exception: {params['exceptionDetails']}"),
            "Log.entryAdded": lambda: self.said.append(f"log: {params['entry']}"),
            "Network.responseReceived": lambda: self.answers.update(
                {params["response"]["url"]: params["response"]["status"]}
            ),
        }
        heard.get(method, lambda: None)()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for end in (self._out, self._in):
            os.close(end)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
