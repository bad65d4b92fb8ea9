"""What a service reports when its node, or its engine, cannot serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.protocols.errors import Code, MisuseError, QuarantineError
from kvflow.server.http.completion_service import ModelCard
from kvflow.server.http.engine_services import DecodeService, PrefillService
from kvflow.server.http.errors import STATUS_OF_CODE, failure_of
from kvflow.testing.pair import pair

CARD = ModelCard(path="m", name="m", context_length=8, vocab_size=8)


def engine() -> Any:
    return SimpleNamespace(healthy=True)


async def test_a_prefill_whose_data_plane_hangs_is_in_trouble() -> None:
    async with pair() as p:
        service = PrefillService(CARD, p.prefill, engine(), 1.0)
        assert service.unavailable_reason == ""
        p.plane(p.prefill).stalled_s = p.timing.lost_after_s + 1
        assert service.unavailable_reason == "the worker of the fake data plane has not moved for 61 s"
        p.plane(p.prefill).stalled_s = float("inf")
        assert service.unavailable_reason == "the worker of the fake data plane has died"
        p.plane(p.prefill).stalled_s = 0.0
        with pytest.raises(MisuseError, match="lends no pages"):
            service.declare_dead(1, "why")


async def test_a_decode_with_too_much_in_quarantine_is_in_trouble() -> None:
    async with pair() as p:
        stopped = engine()
        service = DecodeService(CARD, p.decode, stopped, 1.0)
        ledger = p.decode.shell.endpoint.core.ledger
        ledger.quarantined_pages = ledger.quarantine_limit
        assert service.unavailable_reason == ""
        ledger.quarantined_pages += 1
        assert service.unavailable_reason.startswith("33 pages are in quarantine, more than 32: no new room")
        ledger.quarantined_pages = 0
        stopped.healthy = False
        assert service.unavailable_reason == "the engine has stopped"


def test_a_full_quarantine_is_503() -> None:
    failure = failure_of(QuarantineError(33, 32))
    assert (failure.status, failure.code) == (503, "capacity")


def test_every_code_has_a_status_of_its_own_choice() -> None:
    assert set(STATUS_OF_CODE) == set(Code)
    assert all(400 <= status <= 599 for status in STATUS_OF_CODE.values())
