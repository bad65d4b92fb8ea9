"""`kvflow bench transfer`: goodput through rooms, as a ratio to the bare data plane."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvflow.bench.figures import Say, quartiles
from kvflow.bench.pair import Process, WorkerPair
from kvflow.bench.peer import POLLS_MS, open_peer

SHAPE = {"layers": 32, "heads": 8, "dim": 128, "page_size": 16}
SPARE_PAGES = 64
# A transfer of fewer pages lasts some 50 ms, and depends on the cores on which its threads wake up.
SHORT_PAGES = 256


class Case(NamedTuple):
    """One case: `rooms` rooms at once, of `pages` scattered pages each."""

    pages: int
    rooms: int

    def pairs(self, pairs: int) -> int:
        """Return the number of measured pairs, which is larger for a short case."""
        return pairs * max(1, SHORT_PAGES // (self.pages * self.rooms))

    def __str__(self) -> str:
        return f"{self.pages} pages x {self.rooms}"


CASES = (Case(64, 1), Case(512, 1), Case(2048, 1), Case(64, 8), Case(256, 8))
PEER_CASES = (Case(64, 1), Case(512, 1), Case(64, 8))


async def through_rooms(pair: WorkerPair, case: Case) -> float:
    """Return GB/s, from the first room's opening at decode until decode's last room is done."""
    _, decode = await pair.rooms(case.rooms, case.rooms, case.pages)
    seconds: float = max(decode["done"].values()) - min(decode["opened"].values())
    return case.rooms * case.pages * pair.page_bytes / seconds / 1e9


async def bare(pair: WorkerPair, case: Case) -> float:
    seconds = await pair.raw(case.rooms, case.pages)
    return case.rooms * case.pages * pair.page_bytes / seconds / 1e9


async def bench_plane(
    plane: str, order: str, pairs: int, cases: tuple[Case, ...], say: Say, **setup: Any
) -> dict[str, Any]:
    """Measure one data plane, with at least `pairs` interleaved pairs (rooms, bare) of every case.
    `setup` has more arguments for the workers.

    Returns {"raw": the way of the bare writer, case: {"pairs": their number, "ratio": quartiles,
    "rooms_gb_s": quartiles, "raw_gb_s": quartiles}}.
    """
    pages = max(case.pages * case.rooms for case in cases) + SPARE_PAGES
    report: dict[str, Any] = {}
    shape = {**SHAPE, **setup}
    async with await WorkerPair.open(plane, order=order, pages=pages, **shape) as pair:
        # The largest case warms up the connections, for rooms and bare writes alike.
        await through_rooms(pair, max(cases))
        report["raw"] = await pair.raw_setup()
        for case in cases:
            await through_rooms(pair, case)
            seen = []
            for turn in range(case.pairs(pairs)):
                # The order alternates, so that neither side always runs first.
                if turn % 2:
                    raw, rooms = await bare(pair, case), await through_rooms(pair, case)
                else:
                    rooms, raw = await through_rooms(pair, case), await bare(pair, case)
                seen.append((rooms, raw))
            report[str(case)] = {
                "pairs": len(seen),
                "ratio": quartiles([rooms / raw for rooms, raw in seen]),
                "rooms_gb_s": quartiles([rooms for rooms, _ in seen]),
                "raw_gb_s": quartiles([raw for _, raw in seen]),
            }
            say(f"{plane} {order} {case}: {report[str(case)]['ratio']}")
    return report


async def bench_verified(
    plane: str, order: str, pairs: int, cases: tuple[Case, ...], say: Say, **setup: Any
) -> dict[str, Any]:
    """Measure goodput with and without `--verify-transfers`, in turn, and return the ratio."""
    pages = max(case.pages * case.rooms for case in cases) + SPARE_PAGES
    report: dict[str, Any] = {}
    shape = {**SHAPE, **setup}
    async with await WorkerPair.open(plane, order=order, pages=pages, **shape) as pair:
        for case in cases:
            seen: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(1 + pairs):
                for verified in (True, False) if turn % 2 else (False, True):
                    await pair.both("verify", on=verified)
                    goodput = await through_rooms(pair, case)
                    # Turn 0 warms up and does not count.
                    if turn:
                        seen[verified].append(goodput)
            report[str(case)] = {
                "ratio": quartiles([a / b for a, b in zip(seen[True], seen[False], strict=True)]),
                "verified_gb_s": quartiles(seen[True]),
                "plain_gb_s": quartiles(seen[False]),
            }
            say(f"{plane} {order} {case}, verified: {report[str(case)]['ratio']}")
    return report


async def peer_goodput(peer: Process, case: Case, page_bytes: int, poll_ms: float) -> float:
    """Return the peer's GB/s, from its first send to decode's last success."""
    # The clock starts later than for kvflow, so the comparison favours the peer.
    seen = await peer.ask(
        "rooms", count=case.rooms, concurrency=case.rooms, pages=case.pages, poll_ms=poll_ms
    )
    seconds: float = max(seen["done"].values()) - min(seen["sends"].values())
    return case.rooms * case.pages * page_bytes / seconds / 1e9


async def bench_against_peer(harness: str, pairs: int, say: Say) -> dict[str, Any]:
    """Measure kvflow (page-first) and SGLang, both over Mooncake TCP.

    In each turn, only the better of SGLang's polling intervals counts.
    """
    pages = max(case.pages * case.rooms for case in PEER_CASES) + SPARE_PAGES
    report: dict[str, Any] = {}
    async with (
        await WorkerPair.open("mooncake", order="page_first", pages=pages, **SHAPE) as pair,
        await open_peer(harness, SHAPE, pages) as peer,
    ):
        for case in PEER_CASES:
            await through_rooms(pair, case)
            await peer_goodput(peer, case, pair.page_bytes, POLLS_MS[0])
            mine, theirs = [], []
            # The other side's turn leaves the caches cold, so each side has two tries in a row.
            for _ in range(pairs):
                mine.append(max([await through_rooms(pair, case) for _ in POLLS_MS]))
                theirs.append(
                    max([await peer_goodput(peer, case, pair.page_bytes, p) for p in POLLS_MS])
                )
            report[str(case)] = {
                "ratio": quartiles([a / b for a, b in zip(mine, theirs, strict=True)]),
                "kvflow_gb_s": quartiles(mine),
                "sglang_gb_s": quartiles(theirs),
            }
            say(f"against SGLang, {case}: {report[str(case)]['ratio']}")
    return report


async def bench_transfer(
    planes: tuple[str, ...],
    orders: tuple[str, ...],
    pairs: int,
    peer_harness: str | None,
    verify: bool,
    say: Say,
    copy_threads: int = 0,
) -> dict[str, Any]:
    """Measure every plane with every page order, and then the peer, if there is one.

    If `verify`, measure the planes with and without checksums. `copy_threads` is that of
    `LocalPlane`; 0 is its default.
    """
    report: dict[str, Any] = {"pairs": pairs, "shape": SHAPE}
    setup = {"copy_threads": copy_threads} if copy_threads else {}
    measure = bench_verified if verify else bench_plane
    for plane in planes:
        for order in orders:
            report[f"{plane} {order}"] = await measure(plane, order, pairs, CASES, say, **setup)
    if peer_harness:
        report["mooncake page_first against sglang"] = await bench_against_peer(
            peer_harness, pairs, say
        )
    return report
