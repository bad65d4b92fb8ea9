"""POST /abort_request, through the router on both legs: what runs ends with its tokens so far."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvflow.http.aborts import AbortRequest, RunningChoices
from kvflow.protocols.errors import Code
from kvflow.testing.pair import until
from tests.fakes.servers import Front
from tests.fakes.service import BODY, CHAT, PROMPTS, Role

WITHIN_S = 20


def asking(front: Front, path: str, document: Any, stream: bool = False) -> asyncio.Task[Any]:
    """A request on its way. It ends with its answer, or with the last event of that."""

    async def ask() -> Any:
        if stream:
            return (await front.events(path, document))[-1]
        return await front.post(path, document)

    return asyncio.create_task(asyncio.wait_for(ask(), WITHIN_S))


def reasons(answer: Any) -> list[str]:
    if isinstance(answer, dict) and "choices" in answer:
        return [choice["finish_reason"] for choice in answer["choices"]]
    every = answer if isinstance(answer, list) else [answer]
    return [one["meta_info"]["finish_reason"]["type"] for one in every]


async def until_it_waits(role: Role, count: int = 1) -> None:
    await until(lambda: role.service.held >= count)


async def abort(front: Front, **body: Any) -> int:
    return int((await front.post("/abort_request", body))["aborted"])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_is_what_there_is(front: Front, decode: Role, stream: bool) -> None:
    decode.service.gate.clear()
    body = {"text": "w1", "rid": "mine", "sampling_params": {"max_new_tokens": 5}}
    asked = asking(front, "/generate", body, stream)
    await until_it_waits(decode)
    assert await abort(front, rid="other") == 0
    assert not asked.done()
    assert await abort(front, rid="mine") == 1
    answer = await asked
    assert (answer["output_ids"], reasons(answer)) == ([2], ["abort"])
    assert answer["meta_info"]["completion_tokens"] == 1
    await decode.over(decode.service.requests[0].room)
    assert await abort(front, rid="mine") == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_has_a_finish_reason_too(front: Front, decode: Role, stream: bool) -> None:
    decode.service.gate.clear()
    body = {"messages": CHAT, "rid": "mine", "logprobs": True}
    asked = asking(front, "/v1/chat/completions", body, stream)
    await until_it_waits(decode)
    assert await abort(front, rid="mine") == 1
    answer = await asked
    assert reasons(answer) == ["abort"]
    assert stream or answer["choices"][0]["message"]["content"] == "w2"


async def test_one_of_several_ends_and_the_others_go_on(front: Front, decode: Role) -> None:
    decode.service.gate.clear()
    body = {"text": ["w1", "w5"], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 3}}
    asked = asking(front, "/generate", body)
    await until_it_waits(decode, 2)
    assert await abort(front, rid="a") == 1
    decode.service.gate.set()
    answers = await asked
    assert reasons(answers) == ["abort", "length"]
    assert answers[1]["output_ids"] == [6, 7, 8]


async def test_all_end_in_prefill_as_well(front: Front, prefill: Role, decode: Role) -> None:
    prefill.service.gate.clear()  # so that nothing reaches decode
    asked = [asking(front, "/generate", BODY) for _ in range(4)]
    await until(lambda: len(prefill.pipeline.choices) == len(decode.pipeline.choices) == 4)
    assert await abort(front, abort_all=True) == 4
    for answer in await asyncio.gather(*asked):
        assert (answer["output_ids"], reasons(answer)) == ([], ["abort"])
    for role in (prefill, decode):
        await role.over(*(request.room for request in role.service.requests))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_one_that_decode_has_not_begun_is_answered_too(
    front: Front, prefill: Role, decode: Role, path: str, stream: bool
) -> None:
    """Prefill had ended the room by then, and decode's answer was a 499."""
    prefill.service.gate.clear()
    busy = threading.Event()
    decode.tokenizer._thread.start(lambda _: busy.wait(20))  # so that the prompt waits
    asked = asking(front, path, {**PROMPTS[path], "rid": "mine"}, stream)
    try:
        await until(lambda: len(prefill.pipeline.choices) and decode.pipeline.running)
        assert await abort(front, rid="mine") == 1
        assert len(decode.pipeline.choices) == 0
    finally:
        busy.set()
    assert reasons(await asked) == ["abort"]


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_one_that_ends_as_it_begins_ends_at_the_other_leg_too(
    front: Front, prefill: Role, decode: Role, name: str, monkeypatch: pytest.MonkeyPatch
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
    assert reasons(await asking(front, "/generate", BODY)) == ["abort"]
    ((_, cause),) = role.service.refused
    assert cause.code is Code.ABORTED and not role.service.requests


async def test_neither_an_id_nor_all_is_nothing(front: Front) -> None:
    for body in ({}, {"rid": None}, {"rid": "", "abort_all": False}):
        assert await abort(front, **body) == 0
    await front.refused(400, "/abort_request", data=b'{"rid": 5}')


@pytest.mark.parametrize(
    ("path", "document", "made", "rids"),
    [
        ("/generate", BODY, "from-outside", ["from-outside"]),
        (
            "/v1/completions",
            {"prompt": "w1", "n": 2, "max_tokens": 5},
            "cmpl-from-outside",
            ["from-outside", "cmpl-from-outside"],
        ),
    ],
)
async def test_answers_end_by_the_id_of_their_http_request_and_by_their_own(
    front: Front, decode: Role, path: str, document: Any, made: str, rids: list[str]
) -> None:
    decode.service.gate.clear()
    headers = {"X-Request-ID": "from-outside"}
    choices = document.get("n", 1)
    for count, rid in enumerate(rids, 1):
        asked = asyncio.create_task(front.post(path, document, headers=headers))
        await until_it_waits(decode, count * choices)
        assert await abort(front, rid="") == 0
        assert await abort(front, rid=rid) == choices
        answer = await asyncio.wait_for(asked, WITHIN_S)
        assert (answer.get("id") or answer["meta_info"]["id"]) == made
        assert reasons(answer) == ["abort"] * choices
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
    """Searching a list for every choice took a third of a second for a hundred requests."""
    assert longest_end_s(["same"] * 100) < 20 * longest_end_s([str(i) for i in range(100)])
