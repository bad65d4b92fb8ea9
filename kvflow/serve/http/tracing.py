"""Spans of completions at a prefill or a decode, made from the times that a completion leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion_service import CompletionService, GenerationRequest
from kvflow.telemetry.requests import CURRENT
from kvflow.telemetry.spans import MARKS, TIME_TO_FIRST_CHUNK, Attributes, Marks, Span


def annotate(
    service: CompletionService, requests: Sequence[GenerationRequest], *, stream: bool
) -> None:
    """Add what a body asks for to the span of the current request, if it is traced."""
    span = CURRENT.get().span
    if span is None or not span.recording or not requests:
        return
    params, model = requests[0].params, service.card.name
    attributes: dict[str, str | int | float] = {
        # After a role switch, it differs from the one in the name of the service.
        "kvflow.role": service.role,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.choice.count": len(requests),
        "gen_ai.request.stream": stream,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_new_tokens,
    }
    span.annotate(attributes)


def annotate_first_chunk(after_s: float) -> None:
    """Add the time at which a stream begins to the span of the current request, if it is traced."""
    if (span := CURRENT.get().span) is not None:
        span.annotate({TIME_TO_FIRST_CHUNK: after_s})


def traced(
    service: CompletionService, request: GenerationRequest
) -> AsyncGenerator[TokenOut, None]:
    """Return the tokens of `request`. If it is traced, its spans are added when they end."""
    span = CURRENT.get().span
    if span is None or not span.recording:
        return service.tokens(request)
    return _traced(service, request, span)


async def _traced(
    service: CompletionService, request: GenerationRequest, span: Span
) -> AsyncGenerator[TokenOut, None]:
    marks = Marks()
    # Each completion is read by a task of its own, so this reaches no other completion.
    MARKS.set(marks)
    try:
        async with aclosing(service.tokens(request)) as tokens:
            async for token in tokens:
                marks.token(token.cached_tokens, token.finish_reason)
                yield token
    finally:
        _add_spans(span, marks, request, service.role)


def _add_spans(span: Span, marks: Marks, request: GenerationRequest, role: str) -> None:
    room: Attributes = {} if request.room is None else {"kvflow.room": str(request.room)}
    _add_room(span, marks, room, role)
    if marks.placed_at_s:
        span.child("queue", marks.queued_at_s, marks.placed_at_s, room)
    if marks.steps:
        steps = {
            "kvflow.steps": marks.steps,
            "kvflow.steps_seconds": marks.step_s,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
        span.child("prefill steps", marks.steps_began_at_s, marks.stepped_at_s, {**room, **steps})
    if role == "decode" and marks.first_at_s:
        # A prompt that decode computes itself has no room. Its steps begin after the queue.
        ready_at_s = marks.room_ended_at_s or marks.placed_at_s
        span.child("first token", ready_at_s, marks.first_at_s, room)
        used: dict[str, int | list[str]] = {"gen_ai.usage.output_tokens": marks.tokens}
        if marks.cached_tokens:
            used["gen_ai.usage.cache_read.input_tokens"] = marks.cached_tokens
        if marks.finish_reason:
            used["gen_ai.response.finish_reasons"] = [marks.finish_reason]
        span.child("generation", marks.first_at_s, marks.last_at_s, {**room, **used})


def _add_room(span: Span, marks: Marks, attributes: Attributes, role: str) -> None:
    """Add the stages of a room, which follow each other without a gap at decode."""
    record = None if marks.room is None else marks.room.record
    # A room that was refused has no record, and one that is torn down now has not ended yet.
    if record is None:
        return
    opened_at_s, ready_at_s, moving_at_s = record.opened_at_s, record.ready_at_s, record.moving_at_s
    if ready_at_s is not None:
        span.child("bootstrap", opened_at_s, ready_at_s, attributes)
        # At prefill, the queue and the steps lie between the match and the first chunk.
        if moving_at_s is not None and role == "decode":
            span.child("allocation", ready_at_s, moving_at_s, attributes)
    if moving_at_s is not None and marks.room_ended_at_s:
        span.child("transfer", moving_at_s, marks.room_ended_at_s, attributes)
