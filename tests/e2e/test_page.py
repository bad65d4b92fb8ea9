"""The live page in a real Chromium, over real workers that move, freeze and die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvflow.http.authorization import Keys, bearer
from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.testing.freezing import freeze
from tests.e2e.browser import Browser, browsing, find_chromium
from tests.e2e.fleet import ask
from tests.e2e.service import Service, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("fleets"),
    pytest.mark.skipif(find_chromium() is None, reason="no chromium on this machine"),
]
KEYS = Keys("clients", "open sesame")
# Slow transfers: some rooms are always under way.
LIMITS: dict[str, Any] = {"transfer_rate_limit": 1 << 18, "max_quarantine_share": 0.004}
SHOTS = os.environ.get("TEST_SCREENSHOTS", "")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
QUARANTINED = "document.querySelectorAll('#workers .bar .quarantine')"
NAMELESS = """
    [...document.querySelectorAll("button, input, [tabindex], [role=img], th")].filter(node =>
        node.checkVisibility() && !node.getAttribute("aria-label") &&
        !node.getAttribute("aria-labelledby") && !node.textContent.trim() && !node.labels?.length
    ).map(node => node.outerHTML)
"""
LATEST = """
    [...document.querySelectorAll("#rooms .state.good")].at(-1)
        .closest("tr").querySelector("button")
"""


async def load(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """Ask for one completion after another until cancelled, whatever comes of them."""
    sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    for turn in range(10_000):
        text = f"{number} {turn} " + " ".join(DEMO_PROMPTS)
        body = {"text": text, "sampling_params": sampling, "stream": True}
        try:
            async with session.post(f"{url}/generate", json=body) as answer:
                async for _ in answer.content:
                    pass
        except (aiohttp.ClientError, OSError):
            await asyncio.sleep(0.2)


@asynccontextmanager
async def loaded(url: str) -> AsyncIterator[None]:
    headers = bearer(KEYS.api)
    async with aiohttp.ClientSession(headers=headers) as session:
        loads = [asyncio.create_task(load(session, url, i)) for i in range(6)]
        try:
            yield
        finally:
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)


async def keep(page: Browser, name: str) -> None:
    if SHOTS:
        await page.screenshot(Path(SHOTS) / f"{name}.png")


async def fits(page: Browser, name: str) -> None:
    """At both colour schemes and three widths, all is readable, named, and within the window."""
    for scheme in ("light", "dark"):
        for width in (1360, 800, 390):
            # A phone's picture shows all of the page.
            await page.look(width, 3400 if width < 500 else 1000, scheme)
            wide = await page.run("document.documentElement.scrollWidth")
            assert wide <= width, (name, width, wide)
            worst = await page.run(CONTRAST)
            assert worst[0] >= 4.5, (name, scheme, width, worst)
            await keep(page, f"{name}-{scheme}-{width}")
    assert await page.run(NAMELESS) == []
    await page.look(1360, 1000, "light")


async def enter_key(page: Browser) -> None:
    """The page asks for the operator's key, and takes no other."""
    await page.shows("This router asks for a key")
    assert await page.run("document.activeElement.id") == "key-input"
    assert not await page.run("document.querySelector('#main').checkVisibility()")
    await fits(page, "key")
    await page.write("sesame")
    await page.press("Enter")
    await page.shows("The router refused this key.")
    await page.write(KEYS.admin)
    await page.press("Enter")
    await page.shows("Live", "#link")
    assert not await page.run("document.querySelector('#key').checkVisibility()")


async def read_a_story(page: Browser) -> None:
    """By keyboard alone, from a room to its story and back."""
    await page.until("document.querySelector('#rooms tbody .state.good')")
    await page.run(f"{LATEST}.focus()")
    await page.press("Enter")
    await page.until("document.querySelector('#story').open")
    for part in ("Prefill", "Decode", "chunk queued", "chunk landed", "landed"):
        await page.shows(part, "#story")
    await keep(page, "story")
    await page.press("Escape")
    await page.until("!document.querySelector('#story').open")
    assert await page.run("document.activeElement.className") == "room"


async def read_a_plot(page: Browser) -> None:
    """Arrow keys read a moment in all plots."""
    await page.until("parseFloat(document.querySelector('.plot .value').textContent) > 0")
    await page.until("document.querySelectorAll('.plot .first-line')[4].getAttribute('d')")
    await page.run("document.querySelector('.plot').focus()")
    await page.press("ArrowLeft")
    assert await page.run("document.querySelector('#legend').innerText.startsWith('At ')")
    assert await page.run("document.querySelector('.plot .cursor').getAttribute('d')")
    await page.press("Escape")
    assert not await page.run("document.querySelector('.plot .cursor').getAttribute('d')")


async def freeze_in_mid_transfer(service: Service) -> str:
    """Freeze a prefill that has loans. Returns its name."""
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession(headers=bearer(KEYS.admin)) as session,
    ):
        while True:
            for name in service.names("prefill"):
                if (
                    "transferring"
                    in (await ask(session, f"{service.url(name)}/server_info"))["rooms"]
                ):
                    await freeze(service.workers[name].process.pid)
                    return name
            await asyncio.sleep(0.02)


@pytest.mark.timeout(300)
async def test_the_page_through_a_bad_day(tmp_path: Path) -> None:
    async with serving(2, keys=KEYS, prefix_cache="lru", **LIMITS) as service:
        url = await service.start_router(poll_s=0.2)
        async with browsing(tmp_path / "profile") as page:
            await page.open(f"{url}/ui")
            await enter_key(page)
            await page.shows("4 of 4 up")
            await page.shows("No room yet")
            await fits(page, "rest")
            async with loaded(url):
                await page.until("document.querySelector('#rooms tbody .state.moving')")
                await read_a_plot(page)
                await read_a_story(page)
                await fits(page, "load")
                # So far, nothing has gone wrong: no script failed, and no policy was broken. The
                # wrong key was answered 401 twice, and Chromium logs that.
                assert [e for e in page.errors if "401" not in e] == []
                frozen = await freeze_in_mid_transfer(service)
                host = service.url(frozen).removeprefix("http://")
                await page.shows(f"prefill {host} gets no requests", "#problems")
                await page.shows("in quarantine", "#problems")
                await page.until(f"[...{QUARANTINED}].some(bar => bar.style.width !== '0%')")
                await page.shows("silent", "#peers")
                await fits(page, "quarantine")
                await service.kill("decode-1")
                host = service.url("decode-1").removeprefix("http://")
                await page.shows(f"decode {host} gets no requests: cannot be reached", "#problems")
                await fits(page, "killed")
            assert service.router is not None
            os.kill(service.router.process.pid, signal.SIGKILL)
            await page.shows("Reconnecting", "#link")
            await keep(page, "gone")
            assert not [error for error in page.errors if "exception" in error]


HIDDEN = """
    Object.defineProperty(document, "hidden", {value: %s, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
"""


async def questions(session: aiohttp.ClientSession, url: str) -> int:
    """How often a worker was asked for its rooms, which only the overview does."""
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith('kvflow_requests_total{route="/rooms"')]
    return int(float(found[0].rpartition(" ")[2])) if found else 0


async def no_more_questions(session: aiohttp.ClientSession, url: str) -> None:
    """Between two looks at the counter, more than two intervals pass."""
    async with asyncio.timeout(60):
        before = -1
        while before != (before := await questions(session, url)):
            await asyncio.sleep(2.5)


@pytest.mark.timeout(200)
async def test_workers_are_asked_only_while_the_page_is_looked_at(tmp_path: Path) -> None:
    async with (
        serving(1, keys=KEYS) as service,
        aiohttp.ClientSession(headers=bearer(KEYS.admin)) as session,
    ):
        url, worker = await service.start_router(poll_s=0.2), service.url("decode-0")
        async with browsing(tmp_path / "profile") as page:
            await page.open(f"{url}/ui")
            await enter_key(page)
            async with asyncio.timeout(60):
                while await questions(session, worker) < 3:
                    await asyncio.sleep(0.1)
            await page.run(HIDDEN % "true")
            await page.shows("Paused", "#link")
            await no_more_questions(session, worker)
            before = await questions(session, worker)
            # The key is remembered, so the page goes on by itself.
            await page.run(HIDDEN % "false")
            await page.shows("Live", "#link")
            async with asyncio.timeout(60):
                while await questions(session, worker) < before + 2:
                    await asyncio.sleep(0.1)
        await no_more_questions(session, worker)
