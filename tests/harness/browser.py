# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that opens pages, over its pipe: no driver and no port is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--remote-debugging-pipe"),
)


class BrowserError(Exception):
    """The browser refused something, or a script of the page failed."""


def installed() -> str | None:
    """Returns the program; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A tab of the browser; one thread uses it."""

    def __init__(self, reader: int, writer: int) -> None:
        """Opens an empty page.

        Args:
            reader: descriptor from which the browser's answers are read.
            writer: of what it is sent.
        """
        self._reader, self._writer = reader, writer
        self._number = 0
        self._session: str | None = None
        self._waiting = b""
        self.complaints: list[str] = []
        """What the page's console reports as errors."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """Calls a method of the protocol, and returns its result.

        Raises:
            BrowserError: it failed.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: Mapping[str, Any] = answer["result"]
        return result

    def look(self, width: int, height: int, *, scheme: str) -> None:
        """Makes the page so wide and high, and prefer a colour scheme: `light` or `dark`."""
        is_narrow = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_narrow,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, page: Path) -> None:
        """Opens a file, and waits until it has been drawn."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        while self._next_event() != "Page.loadEventFired":
            pass
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Returns what an expression comes to in the page, after a promise is kept.

        Raises:
            BrowserError: it raised.
        """
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Writes what is seen as a PNG; the whole page if asked for."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def _next_event(self) -> str:
        answer = self._next()
        self._note(answer)
        return str(answer.get("method"))

    def _next(self) -> Mapping[str, Any]:
        while b"\0" not in self._waiting:
            more = os.read(self._reader, 1 << 20)
            if not more:
                raise BrowserError("the browser has ended")
            self._waiting += more
        first, _, self._waiting = self._waiting.partition(b"\0")
        message: Mapping[str, Any] = json.loads(first)
        return message

    def _note(self, event: Mapping[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.complaints.append(str(event["params"]["entry"]["text"]))
        if event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.startswith(("file:", "about:", "data:")):
                self.complaints.append(f"the page asks the network for {url}")


@contextlib.contextmanager
def opened(program: str) -> Iterator[Tab]:
    """Starts the browser with an empty profile; it is ended with the block."""
    to_browser, writer = os.pipe()
    reader, from_browser = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        # The browser reads descriptor 3 and writes descriptor 4.
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        process = subprocess.Popen(
            ["bash", "-c", command, program, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Tab(reader, writer)
        finally:
            os.close(writer)
            os.close(reader)
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the browser and all of its processes: one of them may still write into the profile."""
    others = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.wait()
    for other in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            other.kill()
    psutil.wait_procs(others)
