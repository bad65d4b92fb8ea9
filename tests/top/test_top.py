"""`kvflow top`: the overview in a terminal, in a pipe, and while the router is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from rich.console import Console

from kvflow.http.authorization import Keys
from kvflow.protocols.errors import LostError, MisuseError
from kvflow.top import following
from kvflow.top.screen import duration, lost, rate, screen, size
from tests.fakes.fixtures import decode, meeting, prefill
from tests.fakes.servers import Front, answers, serving
from tests.fakes.service import BODY, Role
from tests.ports import free_port

__all__ = ["decode", "meeting", "prefill"]
ADMIN = "open sesame"


@pytest.fixture
async def front(prefill: Role, decode: Role) -> AsyncIterator[Front]:
    async with Front([prefill], [decode], overview_interval_s=0.02) as made:
        yield made


async def test_one_picture_has_everything_and_ends(
    front: Front, prefill: Role, decode: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    decode.service.changed_report = {"quarantine_pages": 3}
    await front.post("/generate", BODY)
    await following._once(following.Source(front.url, ""))
    told = capsys.readouterr().out
    for part in ("tokens/s", "TTFT p50 / p95", "serving", "fake", "quarantine"):
        assert part in told, part
    for worker in (prefill, decode):
        assert worker.url.removeprefix("http://") in told
    assert "\x1b" not in told, "a pipe got the codes of a terminal"
    await following._once(following.Source(front.url, ""), as_json=True)
    assert json.loads(capsys.readouterr().out)["now"]["quarantine_pages"] == 3


async def test_pictures_follow_each_other_without_a_terminal_and_tell_of_a_lost_router(
    front: Front, capsys: pytest.CaptureFixture[str]
) -> None:
    task = asyncio.create_task(following._live(following.Source(front.url, ""), 0.0))
    told = ""
    try:
        async with asyncio.timeout(30):
            while told.count("tokens/s") < 6:
                await asyncio.sleep(0.02)
                told += capsys.readouterr().out
            await front.router.overview.close()
            while "Reconnecting" not in told:
                await asyncio.sleep(0.02)
                told += capsys.readouterr().out
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "The figures below are of" in told


async def test_a_wrong_key_and_an_absent_router_are_clear_errors(
    prefill: Role, decode: Role, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Front([prefill], [decode], keys=Keys(admin=ADMIN)) as front:
        with pytest.raises(MisuseError, match=r"refused \(401\): the operator's key"):
            await following._once(following.Source(front.url, "sesame"))
        stream = following.snapshots(following.Source(front.url, ADMIN))
        assert (await anext(stream))["router"]["model"] == "fake"
        await stream.aclose()
    with pytest.raises(LostError, match="Cannot connect"):
        await following._once(following.Source(f"http://127.0.0.1:{free_port()}", ""))
    with pytest.raises(MisuseError, match="--url: 'router:8000' is not"):
        following.show_top(following.Source("router:8000", ""), 1.0, once=True)
    busy = answers('{"error": {"message": "too many viewers"}}', status=503)
    async with serving(web.get("/overview/events", busy)) as server:
        with pytest.raises(LostError, match="answered 503: too many viewers"):
            await following._once(following.Source(server.url, ""))
        task = asyncio.create_task(following._live(following.Source(server.url, ""), 0.0))
        told = ""
        async with asyncio.timeout(30):
            while told.count("Reconnecting") < 2:
                await asyncio.sleep(0.02)
                told += capsys.readouterr().out
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert "too many viewers" in told
    no_router = serving(web.get("/overview/events", answers("event: snapshot\ndata: {\n\n")))
    async with no_router as server:
        with pytest.raises(LostError):
            await following._once(following.Source(server.url, ""))


async def test_a_picture_fits_the_terminal(front: Front) -> None:
    for _ in range(30):
        await front.post("/generate", BODY)
    stream = following.snapshots(following.Source(front.url, ""))
    snapshot = await anext(stream)
    await stream.aclose()
    half = {"worker": "", "stale": False, "phase": "success", "ended": True, "cause": None}
    half |= {"bytes_landed": 1, "bytes_total": 2}
    room = {"room": "1", "request_id": "", "opened_ago_s": 1.0, "prefill": half, "decode": None}
    snapshot["rooms"] = [room] * 200
    console = Console(width=140, height=30, force_terminal=True)
    with console.capture() as capture:
        console.print(screen(snapshot, front.url, 30))
    assert 20 <= len(capture.get().splitlines()) <= 30
    with console.capture() as capture:
        console.print(lost(None, front.url, "it does not answer"))
    assert "it does not answer" in capture.get()


def test_units() -> None:
    assert [size(n) for n in (None, 0, 999, 65536, 1.5e9, 123456)] == [
        *("–", "0 B", "999 B", "65.5 kB", "1.5 GB", "123 kB"),
    ]
    assert [duration(n) for n in (None, 0.0123, 1.5)] == ["–", "12.3 ms", "1.50 s"]
    assert [rate(n) for n in (None, 0.0, 3.456, 12345.6)] == ["–", "0", "3.46", "12,346"]
