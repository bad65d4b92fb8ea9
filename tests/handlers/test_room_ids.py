"""Room ids of any integer type are one number; anything else is refused where it is given."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvflow.protocols.errors import Cause, Code, MisuseError
from kvflow.testing.pair import Pair
from tests.handlers.scenes import PROMPT, code_of, finish, matched, success

WHY = Cause(Code.CAPACITY, "full")


@pytest.mark.parametrize(
    "number", [np.int64(7), np.uint8(7), np.uint64(2**63), np.int32(0), True, 2**64 - 1], ids=repr
)
async def test_any_integer_is_a_room_id(p: Pair, number: Any) -> None:
    await success(p, number)
    await p.rest()
    source, target = await matched(p, number)
    assert type(source.room) is type(target.room) is int
    assert source.room == target.room == int(number)
    target.close(WHY)
    assert await code_of(source.done()) is WHY.code


async def test_numpy_and_python_integers_name_the_same_room(p: Pair) -> None:
    source = p.prefill.room(np.int64(9), PROMPT)  # type: ignore[arg-type]
    target = await p.decode.room(9, "sim", PROMPT)
    await source.matched()
    with pytest.raises(MisuseError, match="in use"):
        p.prefill.room(np.uint16(9), PROMPT)  # type: ignore[arg-type]
    await finish(p, source, target)
    p.decode.refuse(np.int64(10), "sim", WHY)  # type: ignore[arg-type]
    assert await code_of(p.prefill.room(10, PROMPT).matched()) is WHY.code
    p.prefill.refuse(np.int64(11), WHY)  # type: ignore[arg-type]
    assert await code_of(p.decode.room(11, "sim", PROMPT).landed()) is WHY.code


@pytest.mark.parametrize("bad", [7.0, "7", None, np.float64(7), -1, 2**64, np.int64(-1)], ids=repr)
async def test_what_is_no_room_id_leaves_nothing_behind(p: Pair, bad: Any) -> None:
    if isinstance(bad, int | np.integer):
        text = f"room id {int(bad)} is not an unsigned 64-bit integer"
    else:
        text = re.escape(f"room id {bad!r} is not an integer")
    source, innocent = await matched(p, 1)
    for call in (
        lambda: p.prefill.room(bad, PROMPT),
        lambda: p.prefill.refuse(bad, WHY),
        lambda: p.decode.room(bad, "sim", PROMPT),
        lambda: p.decode.announce(bad, "sim", PROMPT),
        lambda: p.decode.refuse(bad, "sim", WHY),
    ):
        with pytest.raises(MisuseError, match=text):
            call()
    assert set(p.prefill.shell.endpoint.rooms) == {1} and len(p.decode.shell.endpoint.rooms) == 1
    assert len(p.decode.shell.endpoint.core.ledger) == 1 and p.decode.pages.free_pages == 59
    for node in (p.prefill, p.decode):
        # What is due serves every room.
        p.clock(node).advance(p.timing.heartbeat_s + p.timing.repeat_after_s)
    await finish(p, source, innocent)
