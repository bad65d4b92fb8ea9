"""An end on one side reaches the other client in under a second, with its reason (I4)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.machinery import Timer
from kvflow.protocols.wire.messages import Abort, Bootstrap, ChunkDone, RoomFailed
from kvflow.testing.pair import Pair
from kvflow.transports.data.fake import Fault
from tests.handlers.in_virtual_time import Ending, closed, in_virtual_time
from tests.handlers.scenes import PROMPT, WHY, matched, midway, offered, sending

FULL = Cause(Code.CAPACITY, "no page for another token")


# --- prefill's side fails, decode's client hears it


async def prefill_refuses_before_decode_comes(p: Pair) -> Any:
    await matched(p, 1)
    p.prefill.refuse(7, FULL)
    return p.decode.room(7, "sim", PROMPT).landed(), FULL.code, FULL.text


async def prefill_refuses_after_decode_came(p: Pair) -> Any:
    target = await offered(p)
    p.prefill.refuse(7, FULL)
    return target.landed(), FULL.code, FULL.text


async def the_prompts_differ(p: Pair) -> Any:
    target = await offered(p)
    p.prefill.room(7, range(3))
    return target.landed(), Code.PROMPT_MISMATCH, "prefill's prompt has 3 tokens"


async def the_write_fails(p: Pair) -> Any:
    _, target = await sending(p, Fault.ERROR)
    return target.landed(), Code.TRANSFER_ERROR, "scripted error"


async def prefill_runs_out_of_time(p: Pair) -> Any:
    source, target = await matched(p)
    source.record.own_deadline_at_s = p.clock(p.prefill).now()
    p.prefill.shell.endpoint.core.set_deadline(source.record)
    p.clock(p.prefill).advance(0)
    return target.landed(), Code.DEADLINE, "room 7: nothing more came"


async def prefill_closes(p: Pair) -> Any:
    _, target = await midway(p)
    # Awaited by the pair's own.
    asyncio.get_running_loop().create_task(p.prefill.close(), name="close")
    return target.landed(), Code.SHUTDOWN, "prefill is shutting down"


async def prefill_dies(p: Pair) -> Any:
    _, target = await midway(p)
    await p.crash(p.prefill)
    return target.landed(), Code.PEER_LOST, "died"


# --- decode's side fails, prefill's client hears it


async def the_client_leaves_before_its_bootstrap_arrives(p: Pair) -> Any:
    await matched(p, 1)
    p.network.drop(Bootstrap)
    source, target = await p.open(7, PROMPT)
    target.close(WHY)
    return source.matched(), WHY.code, WHY.text


async def decode_has_no_pages(p: Pair) -> Any:
    await matched(p, 1)
    source = p.prefill.room(7, PROMPT)
    with pytest.raises(KvflowError):
        await p.decode.room(7, "sim", range(4 * 1000))
    return source.matched(), Code.CAPACITY, "asked for 1000"


async def decode_runs_out_of_time(p: Pair) -> Any:
    source, target = await matched(p)
    p.decode.shell.endpoint.core.deadlines.set(
        Timer("deadline", target.grant), p.clock(p.decode).now()
    )
    p.clock(p.decode).advance(0)
    return source.done(), Code.DEADLINE, "room 7: deadline"


async def decode_closes(p: Pair) -> Any:
    source, _ = await midway(p)
    await p.decodes.pop().close()
    return source.done(), Code.SHUTDOWN, "decode is shutting down"


async def decode_dies(p: Pair) -> Any:
    source, _ = await midway(p)
    await p.crash(p.decode)
    return source.done(), Code.PEER_LOST, "died"


AT_PREFILL: list[Ending] = [
    closed("prefill", matched),
    closed("prefill", midway),
    closed("prefill", matched, FULL),
    prefill_refuses_before_decode_comes,
    prefill_refuses_after_decode_came,
    the_prompts_differ,
    the_write_fails,
    prefill_runs_out_of_time,
    prefill_closes,
    prefill_dies,
]
AT_DECODE: list[Ending] = [
    closed("decode", matched),
    closed("decode", midway),
    the_client_leaves_before_its_bootstrap_arrives,
    decode_has_no_pages,
    decode_runs_out_of_time,
    decode_closes,
    decode_dies,
]
# Nobody is left to say it again.
UNSAID: list[Ending] = [prefill_closes, prefill_dies, decode_closes, decode_dies]
LOSSY = [ending for ending in [*AT_PREFILL, *AT_DECODE] if ending not in UNSAID]


@pytest.mark.parametrize("ending", [*AT_PREFILL, *AT_DECODE])
def test_the_other_client_hears_why(
    ending: Ending, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_virtual_time(ending, (), seed, monkeypatch)


@pytest.mark.parametrize("ending", LOSSY)
def test_also_when_the_first_word_is_lost(
    ending: Ending, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_virtual_time(ending, (RoomFailed, Abort, ChunkDone), seed, monkeypatch)
