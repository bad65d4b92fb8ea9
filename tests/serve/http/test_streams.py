"""What a stream costs, in work and not in time: each token, silence, a client that is slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.http.growing import BLOCK_BYTES
from kvflow.protocols.errors import Cause, Code, room_error
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion_service import GenerationRequest
from tests.fakes.servers import events_of
from tests.fakes.service import CHAT, META, FakeService, Meeting, Role, body

TOP = tuple((i, -1.0 - i) for i in range(20))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all that was encoded as JSON."""
    sizes, encode = list[int](), msgspec.json.encode

    def noted(*args: Any, **options: Any) -> bytes:
        found = encode(*args, **options)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(msgspec.json, "encode", noted)
    return sizes


class LongService(FakeService):
    """A decode without a prefill, whose next token comes when the last one was written."""

    def __init__(self) -> None:
        super().__init__("decode", Meeting())
        self.limits = EngineLimits(200_000, 100, 16, 200_000)
        self.paced = True
        self.generated = asyncio.Event()

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        self.started.set()
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise room_error(self.failure)
            count = request.params.max_new_tokens
            for i in range(1, count + 1):
                for _ in range(3 if self.paced else 0):
                    await asyncio.sleep(0)
                top = TOP[: request.params.logprobs or 0]
                if i == count:
                    self.generated.set()
                yield TokenOut(i % 100, -0.5, top, "length" if i == count else None)
        finally:
            self.ended.put_nowait(request.room or 0)


class LongDecode(Role):
    def __init__(self, **options: Any) -> None:
        self.long = LongService()
        super().__init__(self.long, **options)


def generate_body(tokens: int, stream: bool = True) -> dict[str, Any]:
    asked = {"return_logprob": True, "top_logprobs_num": 20}
    return body(stream=stream, sampling_params={"max_new_tokens": tokens}, **asked)


def chat_body(tokens: int, stream: bool = True) -> dict[str, Any]:
    asked = {"logprobs": True, "top_logprobs": 20, "max_tokens": tokens}
    return {"messages": CHAT, "stream": stream, **asked, **META}


BODIES = {"/generate": generate_body, "/v1/chat/completions": chat_body}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_is_encoded_once(encoded: list[int], path: str, stream: bool) -> None:
    """Events repeat: the 4,000th took 57 ms of the loop when each was encoded anew."""
    sizes = []
    raw = b""
    async with LongDecode() as decode:
        for tokens in (100, 400):
            encoded.clear()
            answer = await decode.call("POST", path, BODIES[path](tokens, stream))
            raw = answer.body
            sizes.append(sum(encoded))
            assert answer.status == 200
    assert sizes[1] < 4.5 * sizes[0]
    assert sizes[1] / 400 < 4000
    last = events_of(raw)[-1] if stream else json.loads(raw)
    if path == "/generate":
        assert last["output_ids"] == [i % 100 for i in range(1, 401)]
        assert len(last["meta_info"]["output_top_logprobs"]) == 400


@pytest.mark.parametrize("path", BODIES)
async def test_a_token_costs_no_task_and_no_timer(path: str) -> None:
    loop = asyncio.get_running_loop()
    made = 0

    def counted(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal made
        made += 1
        return asyncio.Task(coro, loop=loop, **options)

    tasks, events = [], []
    async with LongDecode(keepalive_s=60) as decode:
        for tokens in (10, 200):
            made = 0
            loop.set_task_factory(counted)
            try:
                answer = await decode.call("POST", path, BODIES[path](tokens))
                events.append(len(events_of(answer.body)))
            finally:
                loop.set_task_factory(None)
            tasks.append(made)
    assert events[1] > 2 * events[0]
    assert tasks[1] - tasks[0] <= 2  # of the client's own


async def test_a_client_that_does_not_keep_up_is_sent_the_last_event_and_not_every_one() -> None:
    async with LongDecode() as decode, decode.opened("/generate", generate_body(2000)) as answer:
        # 600 MB of events, and nobody has read one.
        await asyncio.wait_for(decode.long.generated.wait(), 60)
        raw = await answer.read()
    counts = [len(event["output_ids"]) for event in events_of(raw)]
    assert counts == sorted(set(counts))
    assert counts[-1] == 2000
    assert len(counts) < 1000


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_encoded_once_and_in_turns(encoded: list[int], stream: bool) -> None:
    """It was encoded for each choice, of a whole answer for all of them in one turn of the loop."""
    text, n = 'w1 "w2" ' * 20_000, 128
    asked = {"prompt": text, "echo": True, "n": n, "max_tokens": 1, "stream": stream}
    raw_body = msgspec.json.encode({**asked, **META})
    encoded.clear()
    async with LongDecode() as decode:
        answer = await decode.call("POST", "/v1/completions", data=raw_body)
        assert answer.status == 200, answer.text
        raw = answer.body
    choices = (
        [choice for event in events_of(raw) for choice in event["choices"]]
        if stream
        else json.loads(raw)["choices"]
    )
    whole = [""] * n
    for choice in choices:
        whole[choice["index"]] += choice["text"]
    assert {one[: len(text)] for one in whole} == {text}
    assert all(len(one) > len(text) or not stream for one in whole)
    assert len(raw) > n * len(text)
    assert sum(encoded) < 4 * len(text)
    assert max(encoded) < BLOCK_BYTES


@pytest.mark.parametrize("stream", [False, True])
async def test_large_answers_are_written_in_blocks(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    sizes = []
    write = aiohttp.web.StreamResponse.write

    async def noted(self: Any, data: Any) -> None:
        sizes.append(len(data))
        await write(self, data)

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", noted)
    async with LongDecode() as decode:
        decode.long.paced = False
        raw = (await decode.call("POST", "/generate", generate_body(3000, stream))).body
    last = events_of(raw)[-1] if stream else json.loads(raw)
    assert len(last["output_ids"]) == 3000
    assert len(raw) > 4 * BLOCK_BYTES
    assert max(sizes) <= BLOCK_BYTES


async def test_headers_and_empty_lines_come_before_a_late_first_token() -> None:
    async with LongDecode(headers_after_s=0.05) as decode:
        decode.service.gate.clear()
        async with decode.opened("/generate", generate_body(2)) as answer:
            assert answer.status == 200
            assert await asyncio.wait_for(answer.content.readline(), 20) == b"\n"
            decode.service.gate.set()
            assert events_of(await answer.read())[-1]["output_ids"] == [1, 2]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_the_headers_is_the_first_event(path: str) -> None:
    """A router may retry what has produced nothing: only empty lines come before."""
    async with LongDecode(headers_after_s=0.05) as decode:
        decode.service.gate.clear()
        decode.service.failure = Cause(Code.CAPACITY, "because")
        async with decode.opened(path, BODIES[path](2)) as answer:
            assert answer.status == 200
            decode.service.gate.set()
            raw = await answer.read()
    assert not any(
        line.startswith(b"data") for line in raw[: raw.index(b'data: {"error"')].splitlines()
    )
    ((error),) = events_of(raw)
    assert error["error"]["code"] == "capacity"


async def test_an_error_before_the_headers_is_a_status() -> None:
    async with LongDecode(headers_after_s=60) as decode:
        decode.service.gate.clear()
        decode.service.failure = Cause(Code.CAPACITY, "because")
        request = asyncio.create_task(decode.refused(503, "/generate", generate_body(2)))
        await decode.begun()
        decode.service.gate.set()
        await request


async def test_a_client_that_leaves_before_the_headers_ends_its_room() -> None:
    async with LongDecode(headers_after_s=60) as decode:
        decode.service.gate.clear()
        request = asyncio.create_task(decode.post("/generate", generate_body(2)))
        await decode.begun()
        request.cancel()
        await decode.over(7)
