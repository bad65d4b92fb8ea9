"""The physical limit for every goodput figure: the same page lists over the bare data plane.

Blocks are planned before the clock starts. Each writer tries several ways and keeps the fastest.
Ways differ in block size. For mooncake and nixl, they also differ in the window, and in whether the
writer spins or pauses while it waits. Spinning takes a core from the engine.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.pages.plan import Blocks, Pairing
from kvflow.protocols.ports import DataPlane, PlaneAddress
from kvflow.transports.data.local import LocalPlane, map_peer
from kvflow.transports.data.mooncake.plane import MooncakePlane
from kvflow.transports.data.nixl.agent import Agent, decode_metadata
from kvflow.transports.data.nixl.plane import NixlPlane
from kvflow.transports.data.transfers import DONE, RUNNING, Transfer

BLOCK_SIZES = (1 << 20, 2 << 20, 64 << 20)
WINDOWS = (16, 32, 128)
PAUSES_S = (0.0, 0.0001, 0.0005)
TUNE_ROUNDS = 5
TUNE_PAGES = 256


class Way(NamedTuple):
    """One way of driving the bare plane. The local plane ignores `window` and `pause_s`."""

    block_bytes: int
    window: int = 0
    pause_s: float = 0.0


class RawWriter:
    """Bare writes from one process into a peer's pool. Each data plane has its own subclass."""

    def __init__(self, pairing: Pairing, target_bases: Any) -> None:
        self._pairing, self._target_bases = pairing, target_bases
        self.way = self.ways()[0]

    def ways(self) -> list[Way]:
        return [Way(size) for size in BLOCK_SIZES]

    def tune(self, pages: PageIndices) -> Way:
        """Find the way that moves `pages` fastest, keep it for later writes, and return it."""
        seconds = {}
        for way in self.ways():
            self.way = way
            seconds[way] = statistics.median(self.write(pages) for _ in range(TUNE_ROUNDS))
        self.way = min(seconds, key=seconds.__getitem__)
        return self.way

    def write(self, pages: PageIndices, targets: PageIndices | None = None) -> float:
        """Copy `pages` onto `targets`, or onto scattered target pages, and return the seconds."""
        columns = self.plan(pages, targets)
        start = time.perf_counter()
        self.move(columns)
        return time.perf_counter() - start

    def plan(self, pages: PageIndices, targets: PageIndices | None = None) -> Blocks:
        """Return the blocks of a write; see `write`."""
        if targets is None:
            total = self._pairing.target.num_pages
            targets = (
                np.random.default_rng(len(pages)).permutation(total)[: len(pages)].astype(np.int32)
            )
        blocks = self._pairing.blocks(
            pages, targets, max_block_bytes=self.way.block_bytes, target_bases=self._target_bases
        )
        # The bare calls take one integer at a time. Python ints are faster to pass than numpy ones.
        return Blocks(*(column.tolist() for column in blocks))

    def move(self, blocks: Blocks) -> None:
        raise NotImplementedError


class RawMemmove(RawWriter):
    """The local plane's limit: memmove, block by block, into the shared pool."""

    def __init__(self, ours: PoolLayout, address: PlaneAddress, theirs: PoolLayout) -> None:
        self._segment = map_peer(address, theirs)
        self._segment.prefault()
        bases = np.array(
            [self._segment.address + b.address for b in theirs.buffers], dtype=np.int64
        )
        super().__init__(Pairing(ours, theirs), bases)

    def move(self, blocks: Blocks) -> None:
        memmove = ctypes.memmove
        for source, target, size in zip(*blocks, strict=True):
            memmove(target, source, size)


class RawWindow(RawWriter):
    """Mooncake's limit: a window of blocks, the fastest known way to drive the engine."""

    def __init__(
        self, plane: MooncakePlane, ours: PoolLayout, address: PlaneAddress, theirs: PoolLayout
    ) -> None:
        super().__init__(Pairing(ours, theirs), None)
        self._engine, self._session = plane.engine, address.locator

    def ways(self) -> list[Way]:
        return [
            Way(size, w, pause) for size in BLOCK_SIZES[:2] for w in WINDOWS for pause in PAUSES_S
        ]

    def move(self, blocks: Blocks) -> None:
        submit = self._engine.transfer_submit_write
        check = self._engine.transfer_check_status
        session = self._session
        window: deque[int] = deque()
        for source, target, size in zip(*blocks, strict=True):
            while len(window) >= self.way.window:
                self._follow(window, check)
            window.append(submit(session, source, target, size))
        while window:
            self._follow(window, check)

    def _follow(self, window: deque[int], check: Any) -> None:
        before = len(window)
        while window and (status := check(window[0])):
            # Mooncake's status is 0 while the block is under way, and 1 once the block lands.
            if status != 1:
                raise RuntimeError(f"raw write ended with status {status}")
            window.popleft()
        if len(window) == before and self.way.pause_s:
            time.sleep(self.way.pause_s)


class RawTransfers(RawWriter):
    """NIXL's limit: transfers of `window` blocks each, one after the other.

    Within one machine, posting a transfer copies its bytes before the call returns, so a second
    transfer would only wait for the first.
    """

    def __init__(
        self, plane: NixlPlane, ours: PoolLayout, address: PlaneAddress, theirs: PoolLayout
    ) -> None:
        super().__init__(Pairing(ours, theirs), None)
        self._agent: Agent = plane.agent
        name, metadata = decode_metadata(address.locator, address.process)
        self._peer = plane.reach(name, address.process, metadata, theirs.buffers[0].address).name

    def ways(self) -> list[Way]:
        return [
            Way(size, blocks, pause)
            for size in BLOCK_SIZES
            for blocks in (64, 1 << 30)
            for pause in PAUSES_S[:2]
        ]

    def move(self, blocks: Blocks) -> None:
        agent, total = self._agent, len(blocks.sizes)
        for first in range(0, total, self.way.window):
            part = slice(first, first + self.way.window)
            transfer = agent.prepare(
                "WRITE", self._peer, *(list(column[part]) for column in blocks)
            )
            agent.post(transfer)
            self._follow(transfer)

    def _follow(self, transfer: Transfer) -> None:
        while transfer.status == RUNNING:
            if self.way.pause_s:
                time.sleep(self.way.pause_s)
            self._agent.look(transfer)
        self._agent.release(transfer)
        if transfer.status != DONE:
            raise RuntimeError(f"raw transfer ended with status {transfer.status}")


def open_raw(
    plane: DataPlane, ours: PoolLayout, address: PlaneAddress, theirs: PoolLayout
) -> RawWriter:
    """Return a bare writer from `plane` into the pool at `address`.

    Raises: TypeError for a plane without a bare writer.
    """
    if isinstance(plane, LocalPlane):
        return RawMemmove(ours, address, theirs)
    if isinstance(plane, MooncakePlane):
        return RawWindow(plane, ours, address, theirs)
    if isinstance(plane, NixlPlane):
        return RawTransfers(plane, ours, address, theirs)
    raise TypeError(f"no raw writer for {plane.name}")
