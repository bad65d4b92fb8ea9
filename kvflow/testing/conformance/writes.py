"""Checks for writes. LANDED means that every byte arrived, and cancelling drains a write."""

from __future__ import annotations

import asyncio
from hashlib import sha256

import numpy as np

from kvflow.protocols.errors import LayoutError, TransferError
from kvflow.protocols.pages.layout import Order, build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.testing.conformance.adapter import NotRunError
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
    require,
    until,
)
from kvflow.testing.conformance.peer import Peer
from kvflow.testing.conformance.station import NUM_PAGES, PAGE_SIZE, Side, pages

ORDERS: tuple[Order, ...] = ("page_first", "layer_first")


async def questions(bench: Bench) -> str:
    """The docstring of the plane's module answers all `QUESTIONS`."""
    async with bench.side() as side:
        answers = bench.adapter.answers(side.plane)
    missing = [question for question, answer in answers.items() if not answer]
    require(
        not missing, f"the docstring of the plane's module does not answer: {' '.join(missing)}"
    )
    return "\n".join(f"{question} {answer}" for question, answer in answers.items())


async def landed(bench: Bench) -> str:
    """In pools of either order, LANDED means that every byte arrived, and no other page changes."""
    moved = 0
    for theirs in ORDERS:
        async with bench.peer(theirs) as peer:
            for ours in ORDERS:
                async with bench.side(ours) as side:
                    side.fill(bench.seed)
                    moved += await _land_scattered(bench, side, peer, f"{ours} to {theirs}")
    return f"{moved} bytes in 12 writes, between pools of both orders"


async def _land_scattered(bench: Bench, side: Side, peer: Peer, which: str) -> int:
    """Write 1, 2 and 200 scattered pages, and return their total size in bytes."""
    rng, moved = np.random.default_rng(bench.seed), 0
    route = await side.plane.connect(peer.address, peer.layout)
    for count in (1, 2, 200):
        source, target = (rng.permutation(NUM_PAGES)[:count].astype(np.int32) for _ in range(2))
        # Pages that are not written must not change.
        others = np.setdiff1d(EVERYTHING, target).tolist()
        before = await peer.ask("digest", others)
        write = route.write(source, target)
        outcome = await end_of(write)
        require(
            outcome is WriteOutcome.LANDED,
            f"a write of {count} pages ended {outcome}: {write.error}",
        )
        size = count * side.pool.layout.page_bytes
        require(
            write.landed_bytes == write.total_bytes == size and not write.error,
            f"{write.landed_bytes} of {write.total_bytes} bytes landed, of {size}: {write.error}",
        )
        sent = side.pool.pages_bytes(source).tobytes()
        require(
            await bytes_of(peer, target) == sent, f"{count} pages {which}: other bytes are there"
        )
        require(
            await peer.ask("digest", others) == before, "pages that were not written have changed"
        )
        moved += size
    route.close()
    return moved


async def many_at_once(bench: Bench) -> str:
    """Many concurrent writes land, each on its own pages."""
    async with bench.side() as side, bench.peer() as peer:
        side.fill(3)
        route = await side.plane.connect(peer.address, peer.layout)
        writes = [route.write(pages(i), pages(NUM_PAGES - 1 - i)) for i in range(NUM_PAGES)]
        ended = {await end_of(write) for write in writes}
        require(ended == {WriteOutcome.LANDED}, f"they ended {ended}")
        there = await bytes_of(peer, EVERYTHING[::-1].copy())
        require(
            there == side.pool.pages_bytes(EVERYTHING).tobytes(),
            "pages are not where they were written to",
        )
        return f"{len(writes)} writes of a page"


async def cancelled(bench: Bench) -> str:
    """A cancelled write reports exactly how many bytes landed. No byte arrives after its end."""
    async with bench.side(rate=RATE) as side, bench.peer() as peer:
        side.fill(4)
        route = await side.plane.connect(peer.address, peer.layout)
        write = route.write(EVERYTHING, EVERYTHING)
        await until(lambda: write.landed_bytes > 0 or write.done.done(), "the first byte's landing")
        write.cancel()
        write.cancel()
        outcome = await end_of(write)
        if outcome is WriteOutcome.LANDED:
            raise NotRunError("the write had landed before it could be cancelled")
        require(
            outcome is WriteOutcome.CANCELLED,
            f"a cancelled write to a peer that lives ended {outcome}",
        )
        require(
            0 < write.landed_bytes < write.total_bytes,
            f"{write.landed_bytes} of {write.total_bytes} bytes landed",
        )
        after = await bytes_of(peer, EVERYTHING)
        found = int(np.count_nonzero(np.frombuffer(after, np.uint8)))
        require(
            found == write.landed_bytes,
            f"{write.landed_bytes} bytes are said to have landed, {found} have",
        )
        # The source may change now. A byte that was sent later would differ.
        side.fill(5)
        await asyncio.sleep(SETTLE_S)
        there = await peer.ask("digest", EVERYTHING.tolist())
        require(there == sha256(after).hexdigest(), "bytes came after the write had ended")
        again = route.write(pages(0), pages(NUM_PAGES - 1))
        require(await end_of(again) is WriteOutcome.LANDED, again.error)
        return f"{found} of {write.total_bytes} bytes had landed, and no more came"


async def rate_limit(bench: Bench) -> str:
    """A plane sends at most rate x time bytes, plus one slice."""
    if not bench.adapter.limits_rate:
        raise NotRunError("it takes no rate limit")
    loop, some = asyncio.get_running_loop(), EVERYTHING[:40]
    async with bench.side(rate=RATE) as side, bench.peer() as peer:
        route = await side.plane.connect(peer.address, peer.layout)
        began = loop.time()
        writes = [route.write(some, some), route.write(some + 40, some + 40)]
        for write in writes:
            await end_of(write)
        sent, took_s = sum(write.landed_bytes for write in writes), loop.time() - began
        require(
            # A slice takes 5 ms at this rate. The 8 KiB are a margin.
            sent <= RATE * (took_s + 0.005) + 8192,
            f"{sent} bytes in {took_s:.3f} s, at {RATE} bytes/s",
        )
        return f"{sent} bytes took {took_s:.3f} s at {RATE} bytes/s"


async def bad_lists(bench: Bench) -> str:
    """A write with an invalid page list is refused, and so is a pool with another layout."""
    wrong = [
        ((0,), (NUM_PAGES,)),
        ((-1,), (0,)),
        ((0,), (-1,)),
        ((0, 1), (0,)),
        ((), ()),
        ((0, 1), (0, NUM_PAGES)),
    ]
    async with bench.side() as side, bench.peer() as peer:
        side.fill(1)
        route = await side.plane.connect(peer.address, peer.layout)
        for source, target in wrong:
            try:
                route.write(pages(*source), pages(*target))
            except LayoutError:
                continue
            raise NotConformingError(
                f"a write of pages {source} onto {target} of {NUM_PAGES} was accepted"
            )
        require(await peer.ask("landed") == 0, "one of them wrote")
        other = build_layout([("0.k", "float16", (4, 64))], page_size=PAGE_SIZE, num_pages=4)
        try:
            await side.plane.connect(peer.address, other)
        except LayoutError:
            return f"{len(wrong)} lists and another layout were refused"
        raise NotConformingError("a pool of another layout was connected to")


async def unreachable(bench: Bench) -> str:
    """`connect` to a dead peer or to an unknown address raises TransferError within `WITHIN_S`."""
    async with bench.side() as side:
        async with bench.peer() as peer:
            address, layout = peer.address, peer.layout
        for what, at in (
            ("a peer that is gone", address),
            ("an address of nobody", type(address)("?", "?", address.process)),
        ):
            try:
                await asyncio.wait_for(side.plane.connect(at, layout), WITHIN_S)
            except TransferError:
                continue
            raise NotConformingError(f"{what} was connected to")
    return "a peer that is gone, and an address that is nobody's"


CHECKS = (
    Check("questions", questions),
    Check("landed", landed),
    Check("many at once", many_at_once),
    Check("cancelled", cancelled),
    Check("rate limit", rate_limit),
    Check("bad lists", bad_lists),
    Check("unreachable", unreachable),
)
