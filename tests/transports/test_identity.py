"""Deaths are observed, never assumed."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
import pytest

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import Witness
from kvflow.transports.host.identity import is_alive, own_witness, wait_dead, watch

SAY = (
    "import sys, msgspec; from kvflow.transports.host.identity import own_witness;"
    "print(msgspec.json.encode(own_witness()).decode(), flush=True); sys.stdin.read()"
)


async def child() -> tuple[asyncio.subprocess.Process, Witness]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SAY, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    return process, msgspec.json.decode(await process.stdout.readline(), type=Witness)


async def test_a_death_is_seen_by_every_watcher() -> None:
    process, witness = await child()
    async with watch(witness) as first, watch(witness) as second:
        assert is_alive(witness)
        assert [first.dead, second.dead] == [False, False]
        process.kill()
        await asyncio.wait_for(asyncio.gather(asyncio.shield(first.died), asyncio.shield(second.died)), 5)
        assert [first.dead, second.dead] == [True, True]
    await process.wait()
    assert not is_alive(witness)
    await asyncio.wait_for(wait_dead(witness), 1)


async def test_a_reused_pid_is_a_death() -> None:
    stranger = msgspec.structs.replace(own_witness(), start_ticks=own_witness().start_ticks - 1)
    await asyncio.wait_for(wait_dead(stranger), 1)
    assert is_alive(own_witness()) and not is_alive(stranger)


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
async def test_elsewhere_nothing_can_be_observed(field: str) -> None:
    elsewhere = msgspec.structs.replace(own_witness(), **{field: "elsewhere"})
    with pytest.raises(TransferError, match="another host"):
        watch(elsewhere)
    with pytest.raises(TransferError, match="another host"):
        is_alive(elsewhere)


async def test_no_descriptor_is_left_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    stranger = msgspec.structs.replace(own_witness(), start_ticks=0)
    for witness in (own_witness(), stranger):
        death = watch(witness)
        death.close()
        death.close()
    async with watch(own_witness()) as death:
        waiting = asyncio.ensure_future(wait_dead(own_witness()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert death.died.cancelled() and not death.dead
    assert len(os.listdir("/proc/self/fd")) == before
