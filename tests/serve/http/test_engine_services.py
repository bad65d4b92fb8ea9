"""What a service reports when its node, or its engine, cannot serve."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvflow.handlers.rooms import PrefillRoom, Quarantined
from kvflow.http.errors import STATUS_OF_CODE, failure_of
from kvflow.memory.allocator import PageAllocator
from kvflow.protocols.errors import Cause, Code, KvflowError, MisuseError, QuarantineError
from kvflow.protocols.wire.messages import GrantId
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.http.completion_service import GenerationRequest, ModelCard
from kvflow.serve.http.engine_services import DecodeService, PrefillService, owned_by_kind
from kvflow.testing.pair import pair

CARD = ModelCard(path="m", name="m", context_length=8, vocab_size=8)


def engine() -> Any:
    return SimpleNamespace(healthy=True)


class Waiting:
    """An engine that waits for decode's half, which does not come."""

    healthy = True

    async def prefill(self, room: PrefillRoom, *_: object, **__: object) -> TokenOut:
        async with room:
            await room.matched()
        raise AssertionError("nobody came")


async def test_an_abort_ends_the_room_of_its_request_and_not_the_one_before_of_that_number() -> (
    None
):
    """The end of the first one made the second one a 500, which no abort found."""
    async with pair() as p:
        service = PrefillService(CARD, p.prefill, Waiting(), 60.0)  # type: ignore[arg-type]
        prompt = np.arange(3, dtype=np.uint32)
        first, second = (
            GenerationRequest(room=5, prefill="", prompt=prompt, params=SamplingParams())
            for _ in range(2)
        )

        async def code(request: GenerationRequest) -> Code:
            with pytest.raises(KvflowError) as seen:
                await anext(service.tokens(request))
            return seen.value.code

        ended = asyncio.create_task(code(first))
        await asyncio.sleep(0)
        (room,) = p.prefill.shell.rooms.values()
        # In the turn of the loop in which the first one ends.
        follows = asyncio.create_task(code(second))
        room.close(Cause(Code.DEADLINE))
        assert await ended is Code.DEADLINE
        service.abort(first)
        assert not follows.done()
        service.abort(second)
        assert await asyncio.wait_for(follows, 20) is Code.ABORTED


async def test_a_prefill_whose_data_plane_hangs_is_in_trouble() -> None:
    async with pair() as p:
        service = PrefillService(CARD, p.prefill, engine(), 1.0)
        assert service.unavailable_reason == ""
        p.plane(p.prefill).stalled_s = p.timing.lost_after_s + 1
        assert (
            service.unavailable_reason == "the worker of the fake data plane has not moved for 61 s"
        )
        p.plane(p.prefill).stalled_s = float("inf")
        assert service.unavailable_reason == "the worker of the fake data plane has died"
        p.plane(p.prefill).stalled_s = 0.0
        with pytest.raises(MisuseError, match="no prefill 0000000000000001 owes a loan"):
            service.declare_dead(1, "why")


async def test_a_decode_with_too_much_in_quarantine_is_in_trouble() -> None:
    async with pair() as p:
        stopped = engine()
        service = DecodeService(CARD, p.decode, stopped, 1.0)
        ledger = p.decode.shell.endpoint.core.ledger
        ledger.overdue = ledger.quarantine_limit
        assert service.unavailable_reason == ""
        ledger.overdue = (ledger.overdue[0] + 1,)
        size = p.decode.pool.layout.page_size
        assert service.unavailable_reason.startswith(
            f"33 pages are in quarantine, more than 32 ({33 * size} and {32 * size} tokens): no new"
        )
        ledger.overdue = (0,)
        stopped.healthy = False
        assert service.unavailable_reason == "the engine has stopped"


def test_a_full_quarantine_is_503() -> None:
    failure = failure_of(QuarantineError(33, 32))
    assert (failure.status, failure.code) == (503, "capacity")


def test_every_code_has_a_status_of_its_own_choice() -> None:
    assert set(STATUS_OF_CODE) == set(Code)
    assert all(400 <= status <= 599 for status in STATUS_OF_CODE.values())


def test_owners_of_pages_are_counted_under_the_names_of_the_metrics() -> None:
    pages = PageAllocator(16)
    for count, owner in (
        (3, ("room", 7)),
        (2, ("grant", 9)),
        (4, Quarantined(GrantId(3))),
        (1, ("cache", "prefix")),
    ):
        pages.take(count, owner)
    assert owned_by_kind(pages) == {"room": 5, "quarantine": 4, "cache": 1}
