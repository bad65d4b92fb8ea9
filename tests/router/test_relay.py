"""The router's relay: whole events, whatever pieces they come in and wherever they end."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
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
from tests.fakes.servers import answers, serving


class _Decode:
    """A decode whose stream comes in pieces; it is lost where an error is among them."""

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


async def relay(out: Out, pieces: list[Any]) -> None:
    asked = SimpleNamespace(path="/generate")
    answer = ClientAnswer(asked, RouterMeasures())  # type: ignore[arg-type]
    answer._stream = out
    await answer.relay(_Decode(pieces), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [False, True])
@given(data=st.data())
@settings(max_examples=60)
def test_events_are_relayed_whole_however_they_come(lost: bool, data: st.DataObject) -> None:
    """If the connection is lost, after any number of bytes, whole events precede the error."""
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
    asyncio.run(relay(out, pieces))
    seen = b"".join(out.written)
    assert seen.startswith(whole) and out.ended
    assert seen[len(whole) :].startswith(b'data: {"error"' if lost else b"")
    assert lost or seen == raw


async def test_an_event_that_comes_apart_within_a_line_waits_for_its_end() -> None:
    out = Out()
    within = [b"id: 1\n", b"data: b\n", b"\n", b"id: 2", b"\ndata: c", b"\n\n"]
    pieces: list[Any] = [b"data: a\n\n", *within, b"data: d\n\n"]
    await relay(out, pieces)
    whole = [b"data: a\n\n", b"id: 1\ndata: b\n\n", b"id: 2\ndata: c\n\n", b"data: d\n\n"]
    assert out.written == whole


OPENING = (
    b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, '
    b'"finish_reason": null}]}\n\n'
)
NAMED = b'event: message_start\ndata: {"type": "message_start"}\n\n'


async def test_a_comment_between_what_opens_a_chat_and_its_error_hides_no_error() -> None:
    """Another pair may serve the request: nothing has been generated."""
    error = b'data: {"error": {"message": "no pages", "code": 503}}\n\n'
    out = Out()
    with pytest.raises(PairFailedError):
        await relay(out, [OPENING + b": ka\n\n" + error])
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
        b"event: content_block_start\ndata: {}\n\n",
        b"event: error\ndata: {}\n\n",
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("opening", [OPENING, NAMED], ids=["chat", "named"])
def test_what_says_who_speaks_is_no_token(opening: bytes, count: int, rest: bytes) -> None:
    assert split_opening(opening * count + rest) == (opening * count, rest)


@pytest.mark.parametrize(
    ("code", "status"),
    [(b"503", 503), (b'"peer_lost"', 502), (b"200", 500), (b"5030", 500), (b"null", 0)],
)
def test_an_error_event_has_the_status_of_its_code(code: bytes, status: int) -> None:
    failure = error_in(b'data: {"error": {"message": "no", "code": %b}}\n\n' % code)
    assert (failure.status if failure else 0) == status


def test_an_error_by_name_needs_no_code() -> None:
    data = b'data: {"type": "error", "error": {"type": "internal_error", "message": "no"}}\n\n'
    failure = error_in(b"event: error\n" + data)
    assert failure is not None and (failure.status, failure.message) == (500, "no")
    assert error_in(b"event: ping\n" + data) is None


@asynccontextmanager
async def leg_to(worker: Worker) -> AsyncIterator[Leg]:
    async with aiohttp.ClientSession() as session:
        yield Leg(session, worker, "/generate", b"{}", {})


async def test_how_a_closed_leg_ends_is_no_complaint_of_the_event_loop() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    worker = Worker("decode", "http://127.0.0.1:1")

    async def fail() -> None:
        raise LegFailedError(worker, "it is gone")

    task = asyncio.create_task(fail())
    async with leg_to(worker) as leg:
        task.add_done_callback(leg.dispose)
        await asyncio.wait([task])
        await asyncio.sleep(0)  # done callbacks run in the next turn of the loop
    del task
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (503, "data: {}\n\n"),
        (200, ': wait\n\ndata: {"error": {"code": "capacity", "message": "full"}}\n\n'),
    ],
    ids=["an error that calls itself a stream", "a stream that begins with an error"],
)
async def test_a_leg_that_fails_at_once_has_one_answer_when_it_is_complete(
    status: int, text: str
) -> None:
    fail = answers(text, status=status, content_type="text/event-stream")
    async with (
        serving(web.post("/generate", fail)) as server,
        leg_to(Worker("decode", server.url)) as leg,
    ):
        if status == 503:
            first = await leg.begin()
            assert isinstance(first, web.Response) and first.status == 503
        else:
            assert (await leg.complete()).status == 503
        leg.close()
