"""Bodies whose prompts decode computes itself, without a room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from kvflow.protocols.errors import Code, RefusedError
from kvflow.serve.engine.scheduler.params import EngineLocalPrompts, SamplingParams, TokenOut
from kvflow.serve.http.completion_service import GenerationRequest, ModelCard
from kvflow.serve.http.engine_services import DecodeService
from kvflow.testing.pair import pair, until
from tests.fakes.service import PROMPTS, Role

ALONE: dict[str, Any] = {"compute_prompt": True, "bootstrap_room": None, "bootstrap_host": None}
TEXT = {"text": "w1 w2", "sampling_params": {"max_new_tokens": 3}}


@pytest.mark.parametrize("path", PROMPTS)
async def test_every_route_takes_them(decode: Role, path: str) -> None:
    await decode.post(path, {**PROMPTS[path], **ALONE})
    (request,) = decode.service.requests
    assert request.room is None and request.prefill == ""


async def test_choices_need_no_rooms(decode: Role) -> None:
    sampling = {"max_new_tokens": 1, "n": 2}
    answers = await decode.post(
        "/generate", {"text": ["w1", "w2"], "sampling_params": sampling, **ALONE}
    )
    assert [answer["output_ids"] for answer in answers] == [[2], [2], [3], [3]]
    assert [request.room for request in decode.service.requests] == [None] * 4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**ALONE, "bootstrap_room": 7}, "leave bootstrap_room out"),
        ({**ALONE, "compute_prompt": 1}, "'1' is not true or false"),
        ({**ALONE, "compute_prompt": "x" * 99}, "is not true or false"),
        ({**ALONE, "compute_prompt": False}, "bootstrap_room is missing"),
        ({**ALONE, "compute_prompt": None}, "bootstrap_room is missing"),
    ],
)
async def test_others_are_refused(decode: Role, given: dict[str, Any], said: str) -> None:
    error = await decode.refused(400, "/generate", {**TEXT, **given})
    assert said in error["message"] and not decode.service.requests
    assert error["param"] == ("compute_prompt" if given["compute_prompt"] else None)


async def test_a_prefill_computes_none_without_a_room(prefill: Role) -> None:
    error = await prefill.refused(400, "/generate", {**TEXT, **ALONE})
    assert "this is a prefill" in error["message"] and error["param"] == "compute_prompt"


async def test_they_can_be_aborted(decode: Role) -> None:
    decode.service.gate.clear()
    asking = asyncio.create_task(decode.post("/generate", {**TEXT, **ALONE, "rid": "mine"}))
    await until(lambda: decode.service.held == 1)
    assert (await decode.post("/abort_request", {"rid": "mine"}))["aborted"] == 1
    assert (await asking)["meta_info"]["finish_reason"]["type"] == "abort"
    assert not decode.service.refused


async def test_what_decode_can_and_did_is_told(decode: Role) -> None:
    report = EngineLocalPrompts(chunk=64, prompts=3, tokens=99)
    decode.service.changed_report["local_prompts"] = report
    told = (await decode.get("/server_info"))["local_prompts"]
    assert told == {"chunk": 64, "prompts": 3, "tokens": 99}
    lines = (await decode.metrics()).splitlines()
    assert "kvflow_local_prompts_total 3.0" in lines
    assert "kvflow_local_prompt_tokens_total 99.0" in lines


async def test_a_failure_is_counted_as_the_engines() -> None:
    class Engine:
        healthy = True

        async def compute(self, *_: object) -> AsyncGenerator[TokenOut, None]:
            yield await self._refusal()

        async def _refusal(self) -> TokenOut:
            raise RefusedError("a pair does")

    async with pair() as p:
        card = ModelCard(path="m", name="m", context_length=8, vocab_size=8)
        service = DecodeService(card, p.decode, Engine(), 60.0)  # type: ignore[arg-type]
        prompt = np.arange(3, dtype=np.uint32)
        request = GenerationRequest(room=None, prefill="", prompt=prompt, params=SamplingParams())
        with pytest.raises(RefusedError):
            await anext(service.tokens(request))
        assert p.decode.counts.failures["engine", Code.REFUSED] == 1
        assert not service.rooms()
