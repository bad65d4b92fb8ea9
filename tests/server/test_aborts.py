"""POST /abort_request: what runs ends with what there is, through the router on both legs; what
does not is let be.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from kvflow.http.aborts import AbortRequest, RunningChoices
from kvflow.protocols.errors import Code
from tests.server.fake_service import Role, Server

Session = aiohttp.ClientSession
WITHIN_S = 5


async def post(session: Session, server: Server, path: str, body: Any) -> Any:
    async with session.post(server.make_url(path), json=body) as answer:
        assert answer.status == 200, await answer.text()
        raw = await answer.read()
    if not body.get("stream"):
        return json.loads(raw)
    lines = [
        line.removeprefix("data: ")
        for line in raw.decode().split("\n\n")
        if line.startswith("data: ")
    ]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def until_it_waits(role: Role, count: int = 1) -> None:
    """`count` choices have their first token and wait for the second."""
    async with asyncio.timeout(WITHIN_S):
        while role.service.held < count:
            await asyncio.sleep(0.001)


async def abort(session: Session, server: Server, **body: Any) -> int:
    return int((await post(session, server, "/abort_request", body))["aborted"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_what_there_is(
    server: Server, session: Session, decode: Role, stream: bool
) -> None:
    decode.service.gate.clear()
    body = {"text": "w1", "rid": "mine", "stream": stream, "sampling_params": {"max_new_tokens": 5}}
    asked = asyncio.create_task(post(session, server, "/generate", body))
    await until_it_waits(decode)
    assert await abort(session, server, rid="other") == 0
    assert not asked.done()
    assert await abort(session, server, rid="mine") == 1
    answer = await asyncio.wait_for(asked, WITHIN_S)
    last = answer[-1] if stream else answer
    assert last["output_ids"] == [2]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == 1
    await asyncio.wait_for(decode.service.ended.get(), WITHIN_S)  # the room has ended
    assert len(decode.pipeline.choices) == 0
    assert await abort(session, server, rid="mine") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_has_a_finish_reason_too(
    server: Server, session: Session, decode: Role, stream: bool
) -> None:
    decode.service.gate.clear()
    body = {
        "messages": [{"role": "user", "content": "w1"}],
        "rid": "mine",
        "stream": stream,
        "logprobs": True,
    }
    asked = asyncio.create_task(post(session, server, "/v1/chat/completions", body))
    await until_it_waits(decode)
    assert await abort(session, server, rid="mine") == 1
    answer = await asyncio.wait_for(asked, WITHIN_S)
    last = (answer[-1] if stream else answer)["choices"][0]
    assert last["finish_reason"] == "abort"
    assert stream or last["message"]["content"] == "w2"


async def test_one_of_several_ends_and_the_others_go_on(
    server: Server, session: Session, decode: Role
) -> None:
    decode.service.gate.clear()
    body = {"text": ["w1", "w5"], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 3}}
    asked = asyncio.create_task(post(session, server, "/generate", body))
    await until_it_waits(decode, 2)
    assert await abort(session, server, rid="a") == 1
    decode.service.gate.set()
    first, second = await asyncio.wait_for(asked, WITHIN_S)
    assert (
        first["meta_info"]["finish_reason"]["type"],
        second["meta_info"]["finish_reason"]["type"],
    ) == (
        "abort",
        "length",
    )
    assert second["output_ids"] == [6, 7, 8]


async def test_all_end_in_prefill_as_well(
    server: Server, session: Session, prefill: Role, decode: Role
) -> None:
    prefill.service.gate.clear()  # so that nothing reaches decode
    body = {"text": "w1", "sampling_params": {"max_new_tokens": 5}}
    asked = [asyncio.create_task(post(session, server, "/generate", body)) for _ in range(4)]
    async with asyncio.timeout(WITHIN_S):
        while min(len(role.pipeline.choices) for role in (prefill, decode)) < 4:
            await asyncio.sleep(0.001)
    assert await abort(session, server, abort_all=True) == 4
    for answer in await asyncio.wait_for(asyncio.gather(*asked), WITHIN_S):
        assert (answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]) == ([], "abort")
    for role in (prefill, decode):
        await asyncio.wait_for(role.pipeline.idle.wait(), WITHIN_S)
        assert len(role.pipeline.choices) == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_one_that_decode_has_not_begun_is_answered_too(
    server: Server, session: Session, prefill: Role, decode: Role, path: str, stream: bool
) -> None:
    """Prefill had ended the room by then, and decode's answer was a 499."""
    prefill.service.gate.clear()
    busy = threading.Event()
    decode.tokenizer._thread.start(lambda _: busy.wait(20))  # so that the prompt waits
    body = {"text": "w1", "prompt": "w1", "rid": "mine", "stream": stream}
    asked = asyncio.create_task(post(session, server, path, body))
    try:
        async with asyncio.timeout(WITHIN_S):
            while not (len(prefill.pipeline.choices) and decode.pipeline.running):
                await asyncio.sleep(0.001)
        assert await abort(session, server, rid="mine") == 1
        assert len(decode.pipeline.choices) == 0
    finally:
        busy.set()
    answer = await asyncio.wait_for(asked, WITHIN_S)
    last = answer[-1] if stream else answer
    reason = (
        last["choices"][0]["finish_reason"]
        if "choices" in last
        else last["meta_info"]["finish_reason"]["type"]
    )
    assert reason == "abort"


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_one_that_ends_as_it_begins_ends_at_the_other_leg_too(
    server: Server,
    session: Session,
    prefill: Role,
    decode: Role,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its room was never opened, and the other leg waited for it."""
    role = {"prefill": prefill, "decode": decode}[name]
    listed = role.pipeline.choices.listed

    @contextmanager
    def aborted_at_once(*arguments: Any) -> Iterator[None]:
        with listed(*arguments):
            assert role.pipeline.choices.abort(AbortRequest(abort_all=True)) == 1
            yield

    monkeypatch.setattr(role.pipeline.choices, "listed", aborted_at_once)
    monkeypatch.setattr(role.service, "abort", lambda _: None)  # that knows of no room yet
    answer = await asyncio.wait_for(post(session, server, "/generate", {"text": "w1"}), WITHIN_S)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    ((_, cause),) = role.service.refused
    assert cause.code is Code.ABORTED and not role.service.requests


async def test_neither_an_id_nor_all_is_nothing(server: Server, session: Session) -> None:
    for body in ({}, {"rid": None}, {"rid": "", "abort_all": False}):
        assert await abort(session, server, **body) == 0
    async with session.post(server.make_url("/abort_request"), data=b'{"rid": 5}') as answer:
        assert answer.status == 400


async def test_the_id_of_the_http_request_is_the_id_of_its_answer(
    server: Server, session: Session, decode: Role
) -> None:
    decode.service.gate.clear()
    headers = {"X-Request-ID": "from-outside"}
    body = {"text": "w1", "sampling_params": {"max_new_tokens": 5}}
    asked = asyncio.create_task(
        session.post(server.make_url("/generate"), json=body, headers=headers)
    )
    await until_it_waits(decode)
    assert await abort(session, server, rid="from-outside") == 1
    async with await asyncio.wait_for(asked, WITHIN_S) as answer:
        assert (await answer.json())["meta_info"]["id"] == "from-outside"


@pytest.mark.parametrize("rid", ["from-outside", "cmpl-from-outside"])
async def test_openai_answers_end_by_the_id_of_their_request_too(
    server: Server, session: Session, decode: Role, rid: str
) -> None:
    decode.service.gate.clear()
    headers = {"X-Request-ID": "from-outside"}
    body = {"prompt": "w1", "n": 2, "max_tokens": 5}
    asked = asyncio.create_task(
        session.post(server.make_url("/v1/completions"), json=body, headers=headers)
    )
    await until_it_waits(decode, 2)
    assert await abort(session, server, rid="") == 0
    assert await abort(session, server, rid=rid) == 2
    async with await asyncio.wait_for(asked, WITHIN_S) as answer:
        document = await answer.json()
    assert document["id"] == "cmpl-from-outside"
    assert [choice["finish_reason"] for choice in document["choices"]] == ["abort"] * 2
    assert len(decode.pipeline.choices) == 0


def longest_end_s(ids: list[str]) -> float:
    """Of a request of many choices, the last of a crowd to come and the first to go."""
    choices, found = RunningChoices(), []
    requests = [choices.listed("", [one] * 256, lambda _: None) for one in ids]
    for request in requests:
        request.__enter__()
    for request in reversed(requests):
        began = time.thread_time()  # no other process has a part in it
        request.__exit__(None, None, None)
        found.append(time.thread_time() - began)
    assert len(choices) == 0
    return statistics.median(found)


def test_an_id_that_a_crowd_has_chosen_costs_the_event_loop_no_more_than_one_of_its_own() -> None:
    """It was a list, searched for every choice:
    a third of a second for each of a hundred requests.
    """
    assert longest_end_s(["same"] * 100) < 20 * longest_end_s([str(i) for i in range(100)])
