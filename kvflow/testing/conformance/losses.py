"""Checks with a peer that is killed or frozen. A plane must claim only bytes that landed, and its
fence must return only if the writer can no longer write.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import numpy as np

from kvflow.protocols.errors import TransferError
from kvflow.protocols.ports import WriteOutcome
from kvflow.testing.conformance.bench import (
    EVERYTHING,
    RATE,
    SETTLE_S,
    WITHIN_S,
    Bench,
    Check,
    NotConformingError,
    bytes_of,
    end_of,
    let_write,
    require,
    until,
)
from kvflow.testing.conformance.peer import Peer
from kvflow.testing.conformance.station import Side, pages

_CANARY = 0x5A
# A fence or a write that does not end within this time counts as waiting.
_SHOWN_S = 0.3


async def killed_receiver(bench: Bench) -> str:
    """A write to a killed peer ends. A later write ends, or is refused."""
    # The rate slows the write down, so that the peer is killed in the middle of it.
    async with bench.side(rate=4 * RATE) as side, bench.peer() as peer:
        side.fill(1)
        route = await side.plane.connect(peer.address, peer.layout)
        write = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: write.landed_bytes > 0, "the first byte's landing")
        await peer.kill()
        outcome = await end_of(write)
        require(
            outcome is not WriteOutcome.LANDED or write.landed_bytes == write.total_bytes,
            "landed, but not all",
        )
        require(
            outcome is not WriteOutcome.UNPROVEN or write.error,
            "a write ended UNPROVEN without saying why",
        )
        told = f"the write ended {outcome.value} ({write.error or 'no error'})"
        try:
            again = route.write(pages(0), pages(0))
        except TransferError as error:
            return f"{told}, the next was refused: {error}"
        outcome = await end_of(again)
        return f"{told}, the next {outcome.value}"


async def frozen_receiver(bench: Bench) -> str:
    """While a peer is frozen, a plane claims only bytes that landed in the peer's memory.

    After the peer thaws, the claim is still true, even if the source pages were overwritten. A
    frozen peer does not delay writes to another peer.
    """
    bench.only_between_processes()
    async with bench.side() as side, bench.peer() as peer, bench.peer() as other:
        side.fill(1)
        route = await side.plane.connect(peer.address, peer.layout)
        await peer.freeze()
        write = route.write(EVERYTHING, EVERYTHING)
        second = await side.plane.connect(other.address, other.layout)
        beside = second.write(EVERYTHING, EVERYTHING)
        outcome = await end_of(beside)
        require(
            outcome is WriteOutcome.LANDED,
            f"a frozen peer held up another's write: {outcome}, {beside.error}",
        )
        write.cancel()
        with contextlib.suppress(TimeoutError):
            await end_of(write, _SHOWN_S)
        ended = write.done.done()
        told = write.landed_bytes
        if ended:
            # The write has ended, so it must no longer read the source. Otherwise these new bytes
            # would arrive.
            side.fill(2)
        peer.thaw()
        outcome = await end_of(write)
        await asyncio.sleep(SETTLE_S)
        # Late bytes would have arrived by now, so the count is final.
        there = np.frombuffer(await bytes_of(peer, EVERYTHING), np.uint8)
        found = int(np.count_nonzero(there))
        require(
            found >= told,
            f"{told} bytes were said to have landed while the peer was frozen, {found} have",
        )
        if outcome is not WriteOutcome.UNPROVEN:
            require(
                found == write.landed_bytes,
                f"{outcome.value}: {write.landed_bytes} bytes are claimed, {found} there",
            )
        when = "while it was frozen" if ended else "after the thaw"
        return (
            f"{told} bytes claimed while it was frozen; {outcome.value} {when}, {found} bytes there"
        )


async def fence_of_the_dead(bench: Bench) -> str:
    """A fence waits while its writer lives. After it returns, no byte from the writer arrives."""
    async with bench.side() as side, bench.peer(rate=RATE) as peer:
        await _begin(peer, side)
        fence = asyncio.ensure_future(side.plane.fence(peer.address))
        try:
            await asyncio.wait([fence], timeout=_SHOWN_S)
            if not bench.adapter.death_is_proof:
                return _refused(fence)
            require(not fence.done(), "a writer that lives and writes was fenced")
            await peer.kill()
            try:
                await asyncio.wait_for(asyncio.shield(fence), WITHIN_S)
            except TransferError as error:
                raise NotConformingError(
                    f"the death of a writer of this machine is no proof: {error}"
                ) from error
        finally:
            fence.cancel()
        landed = side.landed_bytes()
        # The pages may have another owner now, whose bytes the dead writer must not change.
        side.wipe(_CANARY)
        await asyncio.sleep(SETTLE_S)
        foreign = side.foreign_bytes(_CANARY)
        require(not foreign, f"{foreign} bytes of a writer arrived after the fence had returned")
        # A second fence for the dead writer must return, too.
        await asyncio.wait_for(side.plane.fence(peer.address), WITHIN_S)
        require(not side.plane.sees_alive(peer.address), "a dead writer is said to be alive")
        return (
            f"{landed} of {side.pool.layout.size_bytes} bytes before the fence returned, 0 after it"
        )


def _refused(fence: asyncio.Future[None]) -> str:
    require(fence.done(), "a fence that can never be proven waits instead of refusing")
    error = fence.exception()
    require(
        isinstance(error, TransferError), f"a fence that can never be proven ended with {error!r}"
    )
    return f"no proof here, and it says so: {error}"


async def fence_of_the_frozen(bench: Bench) -> str:
    """A fence waits while its writer is frozen, because the writer can thaw and continue."""
    bench.only_between_processes()
    async with bench.side() as side, bench.peer(rate=RATE) as peer:
        await _begin(peer, side)
        await peer.freeze()
        require(side.plane.sees_alive(peer.address), "a frozen writer is said not to be alive")
        fence = asyncio.ensure_future(side.plane.fence(peer.address))
        await asyncio.wait([fence], timeout=_SHOWN_S)
        if not bench.adapter.death_is_proof:
            return _refused(fence)
        require(not fence.done(), "a frozen writer was fenced")
        fence.cancel()
        side.wipe()
        peer.thaw()
        await until(lambda: side.landed_bytes() > 0, "the thawed writer's next byte")
        return "not fenced; it went on to write when it was thawed"


async def fence_elsewhere(bench: Bench) -> str:
    """A fence for a writer on another host raises at once, because it cannot observe that host."""
    bench.only_between_processes()
    async with bench.side() as side:
        there = msgspec.structs.replace(side.address.process, boot_id="another boot")
        writer = msgspec.structs.replace(side.address, process=there)
        require(not side.plane.sees_alive(writer), "a process of another host is said to be alive")
        try:
            await asyncio.wait_for(side.plane.fence(writer), WITHIN_S)
        except TransferError as error:
            return str(error)
        raise NotConformingError("a writer of another host was fenced")


async def _begin(peer: Peer, side: Side) -> None:
    await peer.ask("fill", 6)
    await let_write(peer, side)
    await peer.ask("write", EVERYTHING.tolist(), EVERYTHING.tolist())
    await until(lambda: side.landed_bytes() > 0, "the first byte's landing")


CHECKS = (
    Check("killed receiver", killed_receiver),
    Check("frozen receiver", frozen_receiver),
    Check("fence of the dead", fence_of_the_dead),
    Check("fence of the frozen", fence_of_the_frozen),
    Check("fence elsewhere", fence_elsewhere),
)
