"""The overview: workers are asked once for all viewers, and no worker spoils it for the others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvflow.protocols.errors import Cause, Code
from kvflow.router.overview import gathering
from kvflow.router.overview import routes as overview_routes
from kvflow.router.overview.answers import Completions, Counts, Info, Room
from kvflow.router.overview.document import MAX_SHOWN_ROOMS, Seen, merged_rooms
from kvflow.router.overview.rates import WINDOW_S, Window, added, quantile
from kvflow.router.vllm_engine import VllmEngine
from kvflow.router.workers import Worker
from tests.fakes.servers import Front, answers, labelled, serving
from tests.fakes.service import BODY, Role

RARELY_S = 3600.0


@pytest.fixture
async def front(prefill: Role, decode: Role) -> AsyncIterator[Front]:
    """A router that looks once, and not again during a test."""
    async with Front([prefill], [decode], overview_interval_s=RARELY_S) as made:
        yield made


@pytest.fixture
async def busy(prefill: Role, decode: Role) -> AsyncIterator[Front]:
    """A router that looks as often as it can."""
    async with Front([prefill], [decode], overview_interval_s=0.01) as made:
        yield made


async def asked(worker: Role) -> float:
    """How often the overview has asked a worker for its rooms."""
    counts = labelled(await worker.metrics(), "kvflow_requests_total")
    return counts.get(("/rooms", "200"), 0)


async def events(front: Front, count: int) -> list[tuple[str, Any]]:
    """The first events of the stream, by name."""
    found: list[tuple[str, Any]] = []
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{front.url}/overview/events") as answer,
    ):
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        while len(found) < count:
            block = await answer.content.readuntil(b"\n\n")
            head, _, data = block.decode().partition("\ndata: ")
            found.append((head.removeprefix("event: "), json.loads(data)))
    return found


async def test_workers_are_asked_once_for_everybody(front: Front, prefill: Role) -> None:
    await front.post("/generate", BODY)
    assert await asked(prefill) == 0, "somebody was asked while nobody looked"
    looks = await asyncio.gather(*(front.get("/overview") for _ in range(5)))
    streams = await asyncio.gather(*(events(front, 2) for _ in range(5)))
    assert await asked(prefill) == 1
    assert all(look == looks[0] for look in looks)
    assert all(stream[1] == ("snapshot", looks[0]) for stream in streams)
    [point] = streams[0][0][1]["points"]
    assert point == looks[0]["now"]


async def test_what_one_look_shows(front: Front, prefill: Role, decode: Role) -> None:
    decode.service.changed_report = {"quarantine_pages": 3}
    found = await front.get("/overview")
    assert found["router"]["trouble"] == "" and found["router"]["model"] == "fake"
    one, other = found["workers"]
    assert (one["role"], one["url"], one["up"], one["not_seen"]) == (
        "prefill",
        prefill.url,
        True,
        "",
    )
    assert other["pages"]["free"] == 3 and other["quarantine_pages"] == 3
    assert other["peers"] and found["now"]["quarantine_pages"] == 3
    # A rate needs two looks: 0 would be a claim.
    assert found["now"]["tokens_per_s"] is None and other["tokens_per_s"] is None


async def test_looks_go_on_while_somebody_looks_and_end_with_the_last(
    busy: Front, decode: Role
) -> None:
    overview = busy.router.overview
    found = await asyncio.gather(*(events(busy, 6) for _ in range(5)))
    assert all([name for name, _ in stream] == ["history", *["snapshot"] * 5] for stream in found)
    assert overview._watch is not None
    async with asyncio.timeout(60):
        await overview._watch
    looks = overview.looks
    assert overview.viewers == 0 and await asked(decode) <= looks
    await busy.get("/health")
    assert overview.looks == looks
    # Who comes back gets the points of before.
    (_, history), *_ = await events(busy, 1)
    assert len(history["points"]) >= looks


async def test_rates_are_those_of_the_counters(
    busy: Front, decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After a gap of five of these short intervals, the counts would begin anew.
    monkeypatch.setattr(gathering, "LONGEST_GAP", 1e6)
    stream = asyncio.create_task(events(busy, 1000))
    overview = busy.router.overview
    try:
        async with asyncio.timeout(20):
            while not overview.points or overview.points[-1].tokens_per_s != 0:
                await asyncio.sleep(0.01)
            await busy.post("/generate", BODY)
            while not overview.points[-1].requests_per_s:
                await asyncio.sleep(0.01)
            point = overview.points[-1]
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    assert point.tokens_per_s is not None and point.requests_per_s is not None
    assert point.tokens_per_s / point.requests_per_s == pytest.approx(3, rel=0.01)
    assert point.first_token_p50_s is not None and point.inter_token_p95_s is not None
    assert point.failed_per_s == 0


async def test_a_worker_that_hangs_delays_nobody(
    prefill: Role, decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = 0

    async def hang(_: web.Request) -> web.StreamResponse:
        nonlocal questions
        questions += 1
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(gathering, "WORKER_TIMEOUT_S", RARELY_S)
    stuck = serving(web.get("/health", answers()), web.get("/server_info", hang))
    async with (
        stuck,
        Front([prefill], [decode], overview_interval_s=0.02) as front,
    ):
        # Added without the check of a join, which would wait for the hanging answer.
        front.router.workers.all.append(Worker("decode", stuck.url))
        *_, (_, last) = await events(front, 6)
        seen = {one["url"]: one for one in last["workers"]}
        assert seen[prefill.url]["answered_ago_s"] is not None
        assert seen[stuck.url]["answered_ago_s"] is None
        assert questions == 1, "a worker that hangs was asked again"


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ("[]", "not an object"),
        ('{"running": "many"}', "running"),
        ("no JSON", "malformed"),
        (json.dumps({"version": "x" * (1 << 20)}), "larger than 512 KiB"),
        (json.dumps({"bytes_moved": 10**400}), "bytes_moved"),
        (json.dumps({"completions": {"generated_tokens": -1}}), "generated_tokens"),
    ],
    ids=["a list", "a wrong type", "no JSON", "too large", "a huge number", "a negative one"],
)
async def test_a_worker_that_lies_is_shown_as_such(
    prefill: Role, decode: Role, document: str, part: str
) -> None:
    told = answers(document, content_type="application/json")
    async with (
        serving(web.get("/health", answers()), web.get("/server_info", told)) as liar,
        Front([prefill, liar], [decode], overview_interval_s=RARELY_S) as front,
    ):
        found = {one["url"]: one for one in (await front.get("/overview"))["workers"]}
        assert part in found[liar.url]["not_seen"] and found[liar.url]["pool"] is None
        assert found[prefill.url]["not_seen"] == ""


async def test_a_worker_with_other_keys_says_so(front: Front, decode: Role) -> None:
    refused = answers('{"error": {"message": "wrong key"}}', status=401)
    async with serving(web.get("/health", answers()), web.get("/server_info", refused)) as other:
        front.router.workers.all.append(Worker("decode", other.url))
        found = {one["url"]: one for one in (await front.get("/overview"))["workers"]}
        assert found[other.url]["not_seen"] == "/server_info answered 401: wrong key"


async def test_workers_of_another_engine_are_listed_and_not_asked(prefill: Role) -> None:
    async with Front(
        [prefill], [prefill], engine=VllmEngine(), overview_interval_s=RARELY_S
    ) as front:
        found = await front.get("/overview")
        assert len(found["workers"]) == 2 and found["now"]["tokens_per_s"] is None
        assert all((one["running"], one["not_seen"]) == (None, "") for one in found["workers"])
        assert await asked(prefill) == 0


async def test_errors_and_a_missing_pair_are_told(front: Front, decode: Role) -> None:
    decode.service.failure = Cause(Code.ENGINE_ERROR, "a step failed")
    await front.post("/generate", BODY, status=500)
    decode.service.unavailable_reason = "the engine has stopped"
    await front.checked(decode)
    found = await front.get("/overview")
    assert found["router"]["errors"] == {"engine_error": 1}
    assert found["router"]["trouble"]
    assert "the engine has stopped" in found["workers"][1]["trouble"]


async def test_too_many_viewers_are_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_routes, "MAX_VIEWERS", 0)
    answer = await front.call("GET", "/overview/events")
    assert answer.status == 503 and answer.json["error"]["code"] == "overloaded"


async def test_a_stream_ends_with_the_router(front: Front) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{front.url}/overview/events") as answer,
    ):
        await answer.content.readuntil(b"event: snapshot")
        await front.router.overview.close()
        async with asyncio.timeout(60):
            assert (await answer.content.read()).endswith(b"\n\n")


def rooms(*numbers: int, ended: bool = True) -> tuple[Room, ...]:
    return tuple(Room(n, "id", "success", ended, opened_ago_s=float(n)) for n in numbers)


def test_rooms_of_both_sides_are_one_row_and_open_ones_come_first() -> None:
    prefill, decode = Worker("prefill", "http://p"), Worker("decode", "http://d")
    seen = {
        prefill: Seen(rooms=(*rooms(2), *rooms(3, 5, ended=False))),
        decode: Seen(rooms=rooms(1, 2, 3)),
    }
    found, left = merged_rooms(seen)
    assert [room.room for room in found] == ["5", "3", "1", "2"] and left == 0
    both = found[-1]
    assert both.prefill is not None and both.decode is not None
    assert both.prefill.worker == "http://p"
    # What a worker said before it fell silent opens no room.
    seen[prefill].trouble = "no answer"
    found, _ = merged_rooms(seen)
    assert [room.room for room in found if room.open] == []


def test_rooms_are_bounded_and_left_out_ones_counted() -> None:
    seen = {Worker("decode", "http://d"): Seen(rooms=rooms(*range(MAX_SHOWN_ROOMS + 7)))}
    found, left = merged_rooms(seen)
    assert len(found) == MAX_SHOWN_ROOMS and left == 7


def info(tokens: int, incarnation: str = "1", counts: tuple[int, ...] = (0, 0, 0)) -> Info:
    latencies = {"time_to_first_token_s": Counts((1.0, 2.0), counts)}
    completions = Completions(generated_tokens=tokens, latencies=latencies)
    return Info(incarnation=incarnation, completions=completions)


def test_a_window_slides_and_begins_anew_with_another_process() -> None:
    window = Window()
    for second in range(20):
        window.add(float(second), info(10 * second), longest_gap_s=3)
    change = window.change()
    assert change is not None and change.seconds == WINDOW_S
    assert change.per_s(change.tokens) == 10
    window.add(20.0, info(5, "2"), longest_gap_s=3)
    assert window.change() is None, "the counters of another process were subtracted"
    window.add(21.0, info(7, "2"), longest_gap_s=3)
    change = window.change()
    assert change is not None and change.tokens == 2
    window.add(99.0, info(8, "2"), longest_gap_s=3)
    assert window.change() is None, "an average over a gap hides what happened since"


def test_quantiles_are_those_of_prometheus() -> None:
    found = Counts((1.0, 2.0, 4.0), (2, 2, 4, 0))
    assert quantile(found, 0.5) == 2.0
    assert quantile(found, 0.25) == 1.0
    assert quantile(found, 0.75) == 3.0
    assert quantile(Counts((1.0, 2.0), (0, 0, 5)), 0.5) == 2.0  # above all bounds
    assert quantile(Counts((1.0,), (0, 0)), 0.5) is None
    assert quantile(Counts((1.0,), (1,)), 0.5) is None  # a worker's nonsense
    other = Counts((9.0,), (1, 1))
    assert added([found, other, found]) == Counts((1.0, 2.0, 4.0), (4, 4, 8, 0))


PAGE = resources.files("kvflow.router") / "page"


async def test_the_page_loads_nothing_from_elsewhere(front: Front) -> None:
    names = {file.name for file in PAGE.iterdir()}
    assert names == set(overview_routes._FILES)
    index = await front.call("GET", "/ui")
    policy = index.headers["Content-Security-Policy"]
    assert index.status == 200 and index.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in policy and "unsafe" not in policy
    # The policy forbids these anyway: the page would be broken.
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index.text)
    wanted = set(re.findall(r'(?:src|href)="(/[^"]*)"', index.text))
    for name in names:
        answer = await front.call("GET", f"/ui/{name}")
        assert answer.status == 200 and answer.headers["Content-Security-Policy"] == policy
        elsewhere = set(re.findall(r"https?://[^\"'\s)]+", answer.text))
        assert elsewhere <= {"http://www.w3.org/2000/svg"}, name
        if name.endswith(".js"):
            wanted |= {f"/ui/{n}" for n in re.findall(r'from "\./([^"]+)"', answer.text)}
            # What a worker says becomes text, never markup.
            assert not re.search(
                r"innerHTML\s*=[^=]|insertAdjacentHTML|document\.write", answer.text
            )
    assert wanted <= {f"/ui/{name}" for name in names}
    assert (await front.call("GET", "/ui/passwd")).status == 404
