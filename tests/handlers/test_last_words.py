"""What a prefill says when it shuts down: heard, or known not to be."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from kvflow.protocols.errors import Code
from kvflow.protocols.wire.messages import AbortAck, RoomFailed
from kvflow.testing.pair import QUICK, pair
from tests.handlers.scenes import code_of, matched

PATIENT = msgspec.structs.replace(QUICK, heartbeat_s=1.0, repeat_after_s=0.02)


async def test_last_words_that_are_lost_are_said_again(caplog: pytest.LogCaptureFixture) -> None:
    async with pair(timing=PATIENT) as p:
        _, target = await matched(p)
        p.network.drop(RoomFailed)
        p.network.drop(AbortAck)
        with caplog.at_level(logging.WARNING, "kvflow"):
            async with asyncio.timeout(20):
                await p.prefill.close()
        assert await code_of(target.landed()) is Code.SHUTDOWN
        assert "not confirmed" not in caplog.text
        target.close()


async def test_the_wait_for_a_decode_that_hears_nothing_is_bounded_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pair(timing=QUICK) as p:
        _, target = await matched(p)
        p.network.cut()
        with caplog.at_level(logging.WARNING, "kvflow"):
            async with asyncio.timeout(20):
                await p.prefill.close()
        assert (
            f"the ends of 1 rooms are not confirmed by decode {p.decode.incarnation:016x}"
            in caplog.text
        )
        target.close()
