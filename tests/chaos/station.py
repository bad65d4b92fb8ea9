"""A node in a process of its own, told line by line what to do, with an eye on the bytes of its
pool.

    python -m tests.chaos.station prefill|decode

Every room has a word of its own, so that a byte that comes late is seen also in a page another room
has by then.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import msgspec
import numpy as np
import uvloop

from kvflow.bench.canary import CanaryPool
from kvflow.bench.worker import Worker, serve
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import KvflowError
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.wire.ranks import rank_from_json

LAYERS, HEADS, DIM, PAGE_SIZE = 2, 4, 64, 16  # 32 KiB a page
TIMING = Timing(
    heartbeat_s=0.1, lost_after_s=1.0, repeat_after_s=0.1, register_s=3.0, rendezvous_s=1.0
)
POLL_S = 0.001
LOOK_AFTER_S = 0.03


def word_of(room: int) -> np.uint64:
    return np.uint64((room + 1) * 0x0101_0101_0101_0101 & 0xFFFF_FFFF_FFFF_FFFF)


class Station(Worker):
    """The commands.

    A prefill room n sends from the pages of lane n % lanes, once nothing holds them any more.
    """

    async def setup(self, **shape: Any) -> dict[str, Any]:
        timing = msgspec.structs.replace(TIMING, **shape.pop("timing", {}))
        reply = await super().setup(
            layers=LAYERS, heads=HEADS, dim=DIM, page_size=PAGE_SIZE, order="page_first", **shape
        )
        self.canary = CanaryPool(self.pool)
        self.lent = self.canary if self.node.staging is None else CanaryPool(self.node.reached)
        self.sessions: dict[int, PrefillRoom | DecodeRoom] = {}
        self.reused: list[PageIndices] = []
        self.reused_lent: list[PageIndices] = []  # of staging
        self.running: set[asyncio.Task[None]] = set()
        self.words: dict[str, str] = {}  # the first ones that came with each code in a storm
        core: Any = self.node.shell.endpoint.core
        self.node.timing = self.node.shell.timing = core.timing = timing
        if isinstance(self.node, DecodeNode):
            core.links._timing = timing
        return reply

    async def meet(self, *, ranks: list[Any]) -> dict[str, Any]:
        """From now on rooms are opened at this prefill."""
        self.ranks = [rank_from_json(rank) for rank in ranks]
        return {}

    async def begin(self, *, room: int, pages: int) -> dict[str, Any]:
        """Open one half of a room; prefill sends as soon as the other half is there."""
        prompt = np.arange(pages * PAGE_SIZE, dtype=np.int64)
        if isinstance(self.node, DecodeNode):
            self.sessions[room] = await self.node.room(room, self.ranks, prompt)
        else:
            self.sessions[room] = session = self.node.room(room, prompt)
            task = asyncio.create_task(self._send(session, pages))
            self.running.add(task)
            task.add_done_callback(self.running.discard)
        return {}

    async def _send(self, session: PrefillRoom, pages: int) -> None:
        try:
            await session.matched()
            source = self.source_pages[:pages]
            self.canary.mark(source, word_of(session.room), whole=True)
            session.send(source, last=True)
            await session.done()
        except KvflowError:
            return

    async def end(self, *, room: int) -> dict[str, Any]:
        self.sessions[room].close()
        return {}

    async def outcome(self, *, room: int) -> dict[str, Any]:
        """Wait for the end of a room: success, or the code of what ended it.

        A success has the room's own bytes.
        """
        session = self.sessions[room]
        try:
            if isinstance(session, PrefillRoom):
                await session.done()
                return {"outcome": "success"}
            await session.landed()
            foreign = self.canary.foreign_bytes(session.pages, word_of(room), whole=True)
            return {"outcome": "success", "foreign_bytes": int(foreign.sum())}
        except KvflowError as error:
            return {"outcome": str(error.code)}

    async def moved(self, *, room: int) -> dict[str, Any]:
        """The part of a room's pages that has arrived."""
        session = self.sessions[room]
        assert isinstance(session, DecodeRoom)
        foreign = self.lent.foreign_bytes(session.holding.lent, word_of(room))
        return {"moved": float(np.mean(foreign == 0))}

    async def adopt(self, *, room: int) -> dict[str, Any]:
        """The pages of a landed room go on living: their owner writes into them."""
        session = self.sessions[room]
        assert isinstance(session, DecodeRoom)
        self.reused.append(session.keep(("adopted", room)))
        self.canary.mark(self.reused[-1], whole=True)
        return {}

    async def reuse(self) -> dict[str, Any]:
        """Take every free page and write into it, as policy allows."""
        pages = self.node.pages.take(self.node.pages.free_pages, ("reused", len(self.reused)))
        if len(pages):
            self.canary.mark(pages, whole=True)
            self.reused.append(pages)
        free = 0
        if self.lent is not self.canary and (free := self.node.reached.pages.free_pages):
            self.reused_lent.append(
                self.node.reached.pages.take(free, ("reused", len(self.reused_lent)))
            )
            self.lent.mark(self.reused_lent[-1], whole=True)
        return {"pages": len(pages), "staging": free}

    async def let_go(self) -> dict[str, Any]:
        """Give back what `reuse` has taken."""
        for number, pages in enumerate(self.reused):
            self.node.pages.give_back(pages, ("reused", number))
        for number, pages in enumerate(self.reused_lent):
            self.node.reached.pages.give_back(pages, ("reused", number))
        self.reused.clear()
        self.reused_lent.clear()
        return {}

    async def declare_dead(self, *, incarnation: str) -> dict[str, Any]:
        """An operator's word for the end of a prefill."""
        assert isinstance(self.node, DecodeNode)
        self.node.declare_dead(int(incarnation, 16), "its machine is off")
        return {}

    async def foreign(self) -> dict[str, Any]:
        """Bytes of re-used and adopted pages that are not their owner's any more."""
        found = [self.canary.foreign_bytes(pages, whole=True) for pages in self.reused]
        found += [self.lent.foreign_bytes(pages, whole=True) for pages in self.reused_lent]
        return {"bytes": sum(int(each.sum()) for each in found)}

    async def rewrite(self, *, word: int) -> dict[str, Any]:
        """Prefill's next use of its source pages; nothing is done while a write still holds one."""
        if not (held := self.node.pool.pages.held_pages):
            pages = np.arange(self.node.pool.pages.num_pages, dtype=np.int32)
            self.canary.mark(pages, np.uint64(word), whole=True)
        return {"held": held}

    async def under_way(self) -> dict[str, Any]:
        """What the data plane's engine has taken from prefill and not ended."""
        plane: Any = self.node.plane
        return {"handles": plane.under_way.get("handles", 0)}

    async def unseen(self) -> dict[str, Any]:
        """How many of the writers that decode watches it has not looked at: their connections are
        not known apart.
        """
        inbound = getattr(self.node.plane, "_inbound", None)
        writers = () if inbound is None else inbound._writers.values()
        return {"writers": sum(not writer.last_look for writer in writers)}

    async def left(self) -> dict[str, Any]:
        node, tasks = self.node, len(self.running)
        pages = node.pool.pages
        home = (
            pages.free_pages if isinstance(node, DecodeNode) else pages.num_pages - pages.held_pages
        )
        ledger = len(node.shell.endpoint.core.ledger) if isinstance(node, DecodeNode) else 0
        left = {
            "rooms": len(node.shell.endpoint.rooms),
            "loans": ledger,
            "quarantined": node.quarantined_pages,
        }
        if isinstance(node, DecodeNode):
            left["staged"] = not node.staging_at_rest
        return {
            **left,
            "tasks": tasks,
            "away": pages.num_pages - home,
            "errors": node.counts.handler_errors,
        }

    async def storm(
        self, *, first: int, count: int, pages: int, lanes: int, seed: int, quit_part: float
    ) -> dict[str, Any]:
        """`count` rooms, `lanes` at a time, a part of them ended by us at a random moment; how they
        ended.
        """
        chance = random.Random(seed)
        plan = [
            (first + i, chance.random() < quit_part, chance.uniform(0, 0.02)) for i in range(count)
        ]
        outcomes: dict[str, int] = {}
        foreign = 0

        async def lane(number: int) -> None:
            nonlocal foreign
            sources = (
                self.source_pages[number * pages : (number + 1) * pages]
                if self.role == "prefill"
                else None
            )
            for room, quits, after_s in plan[number::lanes]:
                quitter = (
                    asyncio.get_running_loop().call_later(after_s, self._quit, room)
                    if quits
                    else None
                )
                outcome, found = await self._storm_room(room, pages, sources)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                foreign += found
                if quitter is not None:
                    quitter.cancel()

        await asyncio.gather(*(lane(number) for number in range(lanes)))
        return {"outcomes": outcomes, "foreign_bytes": foreign, "words": self.words}

    def _quit(self, room: int) -> None:
        session = self.sessions.get(room)
        # What has landed is its owner's to close, after a look at it.
        if session is not None and not session.ended:
            session.close()

    async def _storm_room(
        self, room: int, pages: int, sources: PageIndices | None
    ) -> tuple[str, int]:
        prompt = np.arange(pages * PAGE_SIZE, dtype=np.int64)
        foreign = 0
        try:
            if isinstance(self.node, PrefillNode):
                assert sources is not None
                self.sessions[room] = sender = self.node.room(room, prompt)
                await sender.matched()
                while self.holds(sources):
                    await asyncio.sleep(POLL_S)
                self.canary.mark(sources, word_of(room), whole=True)
                sender.send(sources, last=True)
                await sender.done()
                return "success", 0
            self.sessions[room] = receiver = await self.node.room(room, self.ranks, prompt)
            try:
                await receiver.landed()
                foreign = int(
                    self.canary.foreign_bytes(receiver.pages, word_of(room), whole=True).sum()
                )
            except KvflowError:
                foreign = await self._next_owner(receiver)
                raise
            finally:
                receiver.close()
            return "success", foreign
        except KvflowError as error:
            self.words.setdefault(str(error.code), str(error))
            return str(error.code), foreign
        finally:
            self.sessions.pop(room, None)

    async def _next_owner(self, room: DecodeRoom) -> int:
        """Take the pages of an aborted room when they are free, write into them, and look again a
        little later.
        """
        home = asyncio.get_running_loop().create_future()
        owner = ("next owner", room.room)

        def take() -> None:
            pages = self.node.pages.take(min(len(room.pages), self.node.pages.free_pages), owner)
            self.canary.mark(pages)
            home.set_result(pages)

        room.on_end(take)
        pages: PageIndices = await home
        await asyncio.sleep(LOOK_AFTER_S)
        foreign = self.canary.foreign_bytes(pages) if len(pages) else np.zeros(0)
        self.node.pages.give_back(pages, owner)
        return int(foreign.sum())

    def holds(self, pages: PageIndices) -> bool:
        return bool(self.node.pool.pages._holds[pages].any())


if __name__ == "__main__":
    uvloop.run(serve(Station(sys.argv[1])))
