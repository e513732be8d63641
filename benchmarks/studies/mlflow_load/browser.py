"""A real browser without a window: opens pages, waits for what they show, measures, clicks and takes pictures.

Needs Chromium, spoken to through its DevTools protocol on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from procap.errors import UserError

if TYPE_CHECKING:
    from aiohttp import ClientWebSocketResponse

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--hide-scrollbars", "--no-first-run", "--disable-background-networking"),
    *("--disable-gpu", "--enable-unsafe-swiftshader", "--use-angle=swiftshader", "--remote-debugging-port=0"),
)
START_SECONDS = 30.0


class Page:
    """One tab."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol and give its result. Raises UserError for a refused one."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            answer = json.loads(await self._socket.receive_str())
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise UserError(f"the browser refused {method}: {answer['error'].get('message')}")
                return answer["result"]

    async def read(self, expression: str) -> Any:
        """The value of a JavaScript expression; None where it fails."""
        result = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    async def open(self, url: str, ready: str, timeout: float = 120.0) -> float:
        """Go to `url`; gives the seconds until the JavaScript expression `ready` is true, raises UserError if never."""
        # A change behind the # alone would load nothing.
        await self.command("Page.navigate", url="about:blank")
        began = time.perf_counter()
        await self.command("Page.navigate", url=url)
        return await self.wait(ready, timeout, began)

    async def wait(self, ready: str, timeout: float = 60.0, began: float | None = None) -> float:
        """Seconds until `ready` is true. Raises UserError when it does not become so."""
        began = time.perf_counter() if began is None else began
        while time.perf_counter() - began < timeout:
            if await self.read(ready):
                return time.perf_counter() - began
            await asyncio.sleep(0.1)
        shown = await self.read("document.body.innerText.slice(0, 200)")
        raise UserError(f"the page does not come to {ready} within {timeout:g} s; it shows: {shown!r}")

    async def size(self, width: int, height: int) -> None:
        """Pixels of the window."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def picture(self, file: Path, clip: dict[str, float] | None = None) -> None:
        """Write what is shown, or the part `clip` (x, y, width, height) of it, as PNG."""
        more = {"clip": {**clip, "scale": 1}} if clip else {}
        result = await self.command("Page.captureScreenshot", format="png", **more)
        file.write_bytes(base64.b64decode(result["data"]))


@asynccontextmanager
async def page(width: int = 1500, height: int = 1000) -> AsyncIterator[Page]:
    """An empty tab of a browser that has no history, no cookies and no extensions; it ends with the block.

    Raises UserError where there is no Chromium or it does not start.
    """
    import aiohttp

    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise UserError(f"pictures of pages need a browser: none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [program, *FLAGS, f"--user-data-dir={home}", f"--window-size={width},{height}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(process, Path(home))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json(content_type=None)
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Page(socket)
                    await tab.command("Page.enable")
                    await tab.size(width, height)
                    yield tab
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(process: subprocess.Popen[bytes], home: Path) -> int:
    file = home / "DevToolsActivePort"
    began = time.perf_counter()
    while time.perf_counter() - began < START_SECONDS and process.poll() is None:
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise UserError("the browser did not start")
