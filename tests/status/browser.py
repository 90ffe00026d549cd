"""Chromium, driven over WebDriver by chromedriver: as much of it as the tests of the live page need."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.ports import reserve_port
from tests.raw_peer import AMPLE_S

__all__ = ["Browser", "browser", "browser_is_available"]

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
]


def browser_is_available() -> bool:
    return shutil.which("chromium") is not None and shutil.which("chromedriver") is not None


class Browser:
    """One window of a browser."""

    def __init__(self, driver: str, session: str) -> None:
        self._session = f"{driver}/session/{session}"

    def call(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        asked = Request(f"{self._session}{path}", data, {"Content-Type": "application/json"}, method=method)
        with urlopen(asked, timeout=AMPLE_S) as reply:
            return json.load(reply)["value"]

    def open(self, url: str) -> None:
        self.call("POST", "/url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page; return what it returns."""
        return self.call("POST", "/execute/sync", script=script, args=list(arguments))

    def text(self) -> str:
        """Return the text that the page shows."""
        return str(self.run("return document.body.innerText"))

    def wait_for(self, script: str, *arguments: Any) -> Any:
        """Return the value of an expression once it is true."""
        ends_at = time.monotonic() + AMPLE_S
        while not (value := self.run(f"return {script}", *arguments)):
            assert time.monotonic() < ends_at, f"never true: {script} {arguments}; the page shows:\n{self.text()}"
        return value

    def wait_for_text(self, *texts: str) -> None:
        """Return once the page shows all of the texts."""
        for text in texts:
            self.wait_for("document.body.innerText.includes(arguments[0])", text)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def resize(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """Prefer light or dark colors."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))
        print(f"screenshot: {path}")


@contextlib.contextmanager
def browser(place: Path) -> Iterator[Browser]:
    """Run a browser with a fresh profile in the directory; end it in the end."""
    port = reserve_port()
    log = place / "chromedriver.log"
    with log.open("wb") as output:
        driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"], stdout=output, stderr=output, start_new_session=True
        )
    base = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(base, driver, log)
        options = {"args": [*FLAGS, f"--user-data-dir={place / 'profile'}"], "binary": shutil.which("chromium")}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        asked = Request(f"{base}/session", json.dumps(wanted).encode(), {"Content-Type": "application/json"})
        with urlopen(asked, timeout=AMPLE_S) as reply:
            window = Browser(base, json.load(reply)["value"]["sessionId"])
        try:
            yield window
        finally:
            window.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(AMPLE_S)


def _wait_until_ready(base: str, driver: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + AMPLE_S
    while True:
        with contextlib.suppress(OSError), urlopen(f"{base}/status", timeout=AMPLE_S) as reply:
            if json.load(reply)["value"]["ready"]:
                return
        assert driver.poll() is None and time.monotonic() < ends_at, log.read_text()
