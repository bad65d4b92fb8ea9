"""A Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# It reaches no host but the one that a test names.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--remote-debugging-port=0"),
)
START_S = 60.0
WITHIN_S = 60.0


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One tab. `errors` has what its console complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._calls = socket, 0
        self.errors: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        self._calls += 1
        own = self._calls
        await self._socket.send_json({"id": own, "method": method, "params": parameters})
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))
            if answer.get("id") == own:
                assert "error" not in answer, answer
                return answer["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, which may be a promise."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = await self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        try:
            async with asyncio.timeout(WITHIN_S):
                # An element would arrive here as an empty object.
                while not await self.run(f"!!({expression})"):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"not within {WITHIN_S:g} s: {expression}\n{text}") from None

    async def shows(self, text: str, within: str = "body") -> None:
        await self.until(f"document.querySelector({within!r})?.innerText.includes({text!r})")

    async def press(self, key: str) -> None:
        enter = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37}[key]
            more = enter if kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def look(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the window, and the colour scheme that its user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(found["data"]))


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Browser]:
    """A new Chromium with an empty profile in this folder."""
    command = find_chromium()
    assert command is not None
    process = await asyncio.create_subprocess_exec(
        *(command, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # In a group of its own, so that its helpers end with it.
        start_new_session=True,
    )
    try:
        async with aiohttp.ClientSession() as session:
            port = await _port(profile / "DevToolsActivePort")
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                tabs = await answer.json()
            tab = next(tab for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Browser(socket)
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(60):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()


async def _port(path: Path) -> int:
    """Return the port at which Chromium listens, once it has written all of its line."""
    async with asyncio.timeout(START_S):
        while not path.exists() or "\n" not in (text := path.read_text()):
            await asyncio.sleep(0.05)
    return int(text.splitlines()[0])
