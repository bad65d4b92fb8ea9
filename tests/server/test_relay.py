"""The router's relay: whole events, whatever pieces they come in and wherever they end."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.router.answer import ClientAnswer
from kvflow.router.legs import Leg, LegFailedError, PairFailedError, error_in, split_opening
from kvflow.router.measures import RouterMeasures
from kvflow.router.workers import Worker
from tests.server.fake_service import served


class _Decode:
    """A decode whose stream comes in the pieces of a list; where that has an error, it is lost
    there.
    """

    def __init__(self, pieces: list[bytes | LegFailedError]) -> None:
        self.decode, self.headers = self, dict[str, str]()
        self._pieces = iter(pieces)

    async def read(self) -> bytes:
        piece = next(self._pieces, b"")
        if isinstance(piece, LegFailedError):
            raise piece
        return piece

    first = read


class Out(web.StreamResponse):
    """What a client gets."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.ended = False

    async def prepare(self, request: Any) -> None:
        return None

    async def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    async def write_eof(self, data: bytes = b"") -> None:
        self.ended = True


@pytest.mark.parametrize("lost", [False, True])
@given(data=st.data())
@settings(max_examples=60)
def test_events_are_relayed_whole_however_they_come(lost: bool, data: st.DataObject) -> None:
    """The connection is lost after any number of bytes: what the client has by then are events, and
    then the error.
    """
    events = data.draw(
        st.lists(st.sampled_from([b"a", b"bb\nid: 1", b"c" * 300]), min_size=1, max_size=6)
    )
    raw = b"".join(b"data: " + event + b"\n\n" for event in events)
    cuts = sorted({0, *data.draw(st.lists(st.integers(1, len(raw)), max_size=12)), len(raw)})
    pieces: list[Any] = [raw[start:end] for start, end in itertools.pairwise(cuts)]
    whole = raw
    if lost:
        end = data.draw(st.integers(raw.index(b"\n\n") + 2, len(raw)))
        pieces = [
            raw[start : min(stop, end)] for start, stop in itertools.pairwise(cuts) if start < end
        ]
        pieces.append(LegFailedError(Worker("decode", "http://127.0.0.1:1"), "lost"))
        whole = raw[: raw.rfind(b"\n\n", 0, end) + 2]
    out = Out()

    async def relayed() -> None:
        answer = ClientAnswer(None, RouterMeasures())  # type: ignore[arg-type]
        answer._stream = out
        await answer.relay(_Decode(pieces), None)  # type: ignore[arg-type]

    asyncio.run(relayed())
    seen = b"".join(out.written)
    assert seen.startswith(whole) and out.ended
    assert seen[len(whole) :].startswith(b'data: {"error"' if lost else b"")
    assert lost or seen == raw


async def test_an_event_that_comes_apart_within_a_line_waits_for_its_end() -> None:
    out = Out()
    answer = ClientAnswer(None, RouterMeasures())  # type: ignore[arg-type]
    answer._stream = out
    within = [b"id: 1\n", b"data: b\n", b"\n", b"id: 2", b"\ndata: c", b"\n\n"]
    pieces: list[Any] = [b"data: a\n\n", *within, b"data: d\n\n"]
    await answer.relay(_Decode(pieces), None)  # type: ignore[arg-type]
    whole = [b"data: a\n\n", b"id: 1\ndata: b\n\n", b"id: 2\ndata: c\n\n", b"data: d\n\n"]
    assert out.written == whole


OPENING = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, '
    b'"finish_reason": null}]}\n\n'
)


async def test_a_comment_between_what_opens_a_chat_and_its_error_hides_no_error() -> None:
    """Another pair may serve the request: nothing has been generated."""
    error = b'data: {"error": {"message": "no pages", "code": 503}}\n\n'
    answer, out = ClientAnswer(None, RouterMeasures()), Out()  # type: ignore[arg-type]
    answer._stream = out
    with pytest.raises(PairFailedError):
        await answer.relay(_Decode([OPENING + b": ka\n\n" + error]), None)  # type: ignore[arg-type]
    assert out.written == [b": ka\n\n"] and not out.ended


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"data: [DONE]\n\n",
        b"data: {no\n\n",
        b": ka\n\n",
        b'data: {"choices": []}\n\n',
        b'data: {"choices": [{"text": ""}]}\n\n',
        b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
        b'data: {"choices": [{"delta": {"role": "assistant", "content": "a"}}]}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": []}}]}\n\n',
        b'data: {"choices": [{"delta": {"content": ""}, "finish_reason": "length"}]}\n\n',
        b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n',
        OPENING[:-1],
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_says_who_speaks_is_no_token(count: int, rest: bytes) -> None:
    assert split_opening(OPENING * count + rest) == (OPENING * count, rest)


@pytest.mark.parametrize(
    ("code", "status"),
    [(b"503", 503), (b'"peer_lost"', 502), (b"200", 500), (b"5030", 500), (b"null", 0)],
)
def test_an_error_event_has_the_status_of_its_code(code: bytes, status: int) -> None:
    failure = error_in(b'data: {"error": {"message": "no", "code": %b}}\n\n' % code)
    assert (failure.status if failure else 0) == status


async def test_how_a_closed_leg_ends_is_no_complaint_of_the_event_loop(
    session: aiohttp.ClientSession,
) -> None:
    """The first failure of a pair has been reported, and ends the other leg, whatever becomes of
    it.
    """
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    worker = Worker("decode", "http://127.0.0.1:1")
    leg = Leg(session, worker, "/generate", b"{}", {})

    async def fail() -> None:
        raise LegFailedError(worker, "it is gone")

    task = asyncio.create_task(fail())
    task.add_done_callback(leg.dispose)
    await asyncio.wait([task])
    await asyncio.sleep(0)  # done callbacks run in the next turn of the loop
    del task
    gc.collect()
    assert complaints == []


async def test_an_error_that_calls_itself_a_stream_is_a_complete_answer(
    session: aiohttp.ClientSession,
) -> None:
    async def fail(_: web.Request) -> web.Response:
        return web.Response(status=503, text="data: {}\n\n", content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/generate", fail)])
    async with served(app) as server:
        leg = Leg(
            session, Worker("decode", f"http://127.0.0.1:{server.port}"), "/generate", b"{}", {}
        )
        answer = await leg.begin()
        assert isinstance(answer, web.Response) and answer.status == 503
        leg.close()


async def test_a_stream_that_begins_with_an_error_is_that_error_when_it_is_complete(
    session: aiohttp.ClientSession,
) -> None:
    async def fail(_: web.Request) -> web.Response:
        error = b'data: {"error": {"code": "capacity", "message": "full"}}\n\n'
        return web.Response(body=b": wait\n\n" + error, content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/generate", fail)])
    async with served(app) as server:
        leg = Leg(
            session, Worker("prefill", f"http://127.0.0.1:{server.port}"), "/generate", b"{}", {}
        )
        assert (await leg.complete()).status == 503
        leg.close()
