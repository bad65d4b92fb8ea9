"""The spans of a completion at real engines and nodes, and those of one that fails on its way."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
import pytest

from kvflow.protocols.errors import Code, KvflowError
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.http.completion_service import CompletionService
from kvflow.serve.http.engine_services import DecodeService, PrefillService
from kvflow.serve.http.tracing import traced
from kvflow.telemetry.requests import CURRENT, RequestTrace
from kvflow.telemetry.spans import MARKS, Attributes
from tests.serve.engine.nodes import nodes
from tests.serve.engine.pair import prompt_of
from tests.serve.engine.test_services import CARD, request


class Child(NamedTuple):
    began_s: float
    ended_s: float
    attributes: Attributes


class Spans:
    """Implements `telemetry.spans.Span` without OpenTelemetry."""

    def __init__(self, *, recording: bool = True) -> None:
        self.recording = recording
        self.began_s = time.perf_counter()
        self.children: dict[str, Child] = {}

    def annotate(self, attributes: Attributes) -> None:
        raise AssertionError(attributes)

    def event(self, name: str) -> None:
        raise AssertionError(name)

    def child(self, name: str, began_s: float, ended_s: float, attributes: Attributes) -> None:
        assert name not in self.children
        self.children[name] = Child(began_s, ended_s, attributes)

    def call(self, name: str, attributes: Attributes) -> tuple[Spans, dict[str, str]]:
        raise AssertionError(name)

    def end(self, error: str = "") -> None:
        raise AssertionError(error)


class Pair(NamedTuple):
    prefill: PrefillService
    decode: DecodeService


@asynccontextmanager
async def services(model: LoadedModel, rendezvous_s: float = 60.0) -> AsyncIterator[Pair]:
    async with nodes(model, chunk_tokens=4, rendezvous_s=rendezvous_s) as found:
        yield Pair(
            PrefillService(CARD, found.prefill, found.sending, 60.0),
            DecodeService(CARD, found.decode, found.landing, 60.0),
        )


async def answered(
    service: CompletionService, spans: Spans, room: int | None = 7, count: int = 5
) -> tuple[int, Code | None]:
    """Serve one completion as a request's task does. Return its tokens, and how it failed."""
    trace = RequestTrace("id")
    trace.span = spans
    CURRENT.set(trace)
    tokens = 0
    try:
        asked = msgspec.structs.replace(request(0, prompt_of(13), count), room=room)
        async for _ in traced(service, asked):
            tokens += 1
    except KvflowError as error:
        return tokens, error.code
    return tokens, None


async def test_the_stages_of_both_halves_follow_each_other(llama: LoadedModel) -> None:
    async with services(llama) as pair:
        at = {service.role: Spans() for service in pair}
        found = await asyncio.gather(
            *(asyncio.create_task(answered(service, at[service.role])) for service in pair)
        )
        assert found == [(1, None), (5, None)]
        over_s = time.perf_counter()
    prefill, decode = at["prefill"].children, at["decode"].children
    assert prefill.keys() == {"bootstrap", "queue", "prefill steps", "transfer"}
    stages = ["bootstrap", "allocation", "transfer", "first token", "generation"]
    assert decode.keys() == {"queue", *stages}
    for before, after in itertools.pairwise(stages):
        assert decode[after].began_s == decode[before].ended_s
    for role, spans in at.items():
        for child in spans.children.values():
            assert spans.began_s <= child.began_s <= child.ended_s <= over_s, role
            assert child.attributes["kvflow.room"] == "7"
    steps = prefill["prefill steps"]
    # 13 tokens in chunks of 4.
    assert steps.attributes["kvflow.steps"] == 4
    assert steps.attributes["gen_ai.usage.input_tokens"] == 13
    busy_s = steps.attributes["kvflow.steps_seconds"]
    assert isinstance(busy_s, float) and 0 < busy_s <= steps.ended_s - steps.began_s
    # The queue is left before the first step, and the first chunk is sent after it.
    assert prefill["queue"].ended_s <= steps.began_s
    assert steps.began_s <= prefill["transfer"].began_s
    generated = decode["generation"].attributes
    assert generated["gen_ai.usage.output_tokens"] == 5
    assert generated["gen_ai.response.finish_reasons"] == ["length"]


async def test_a_prompt_that_decode_computes_itself_has_the_stages_without_a_room(
    llama: LoadedModel,
) -> None:
    async with services(llama) as pair:
        spans = Spans()
        assert await asyncio.create_task(answered(pair.decode, spans, room=None)) == (5, None)
    stages = ["queue", "first token", "generation"]
    assert list(spans.children) == stages
    for before, after in itertools.pairwise(stages):
        assert spans.children[after].began_s == spans.children[before].ended_s
    first = spans.children["first token"]
    assert first.began_s < first.ended_s
    assert not any("kvflow.room" in child.attributes for child in spans.children.values())


async def test_a_completion_that_fails_has_the_stages_that_it_reached(llama: LoadedModel) -> None:
    async with services(llama, rendezvous_s=0.01) as pair:
        for service in pair:
            spans = Spans()
            found = await asyncio.create_task(answered(service, spans, room=8))
            assert found == (0, Code.RENDEZVOUS)
            # A decode that offered its pages in time waits for their first bytes.
            waits = {"queue", "bootstrap", "allocation", "transfer"}
            assert spans.children.keys() <= (waits if service.role == "decode" else set())


@pytest.mark.parametrize("recording", [False, None])
async def test_a_completion_that_is_not_recorded_leaves_no_marks(
    llama: LoadedModel, recording: bool | None
) -> None:
    async with services(llama) as pair:
        trace = RequestTrace("id")
        trace.span = None if recording is None else Spans(recording=recording)
        CURRENT.set(trace)
        asked = request(9, prompt_of(5))
        leg = asyncio.create_task(anext(pair.prefill.tokens(asked)))
        async for _ in traced(pair.decode, asked):
            assert MARKS.get() is None
        await leg
