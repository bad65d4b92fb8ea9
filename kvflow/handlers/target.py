"""Prefill's view of one decode incarnation: the way into its pool, its open grants, and what has ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvflow.protocols.ports import Route
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import AbortAck, ChunkDone, Message, Register

if TYPE_CHECKING:
    from kvflow.handlers.prefill import PrefillHandlers
    from kvflow.handlers.prefill_room import PrefillSession


class Target:
    """One decode incarnation that has registered. Kept through silence, dropped when its process is dead."""

    def __init__(self, home: PrefillHandlers, message: Register) -> None:
        self._home = home
        self.incarnation = message.target
        self.num_pages = message.layout.num_pages
        self.peer = routing_id(message.target)
        self.route: Route | None = None
        self.watch: asyncio.Task[None] | None = None
        self.heard_at_s = home.now()
        self.silent = False
        self.grants: dict[int, PrefillSession] = {}
        self.closed: OrderedDict[int, tuple[Message, ...]] = OrderedDict()
        self.doubtful: set[int] = set()  # evicted from `closed` though some write of theirs may still land
        self.low_water = message.settled_below  # a grant below this has ended or never will begin

    @property
    def phase(self) -> str:
        return "silent" if self.silent else "up" if self.route else "opening"

    def line(self) -> dict[str, Any]:
        """The target as operators see it."""
        return {
            "incarnation": f"{self.incarnation:016x}",
            "phase": self.phase,
            "heard_ago_s": round(self._home.now() - self.heard_at_s, 3),
            "rooms": len(self.grants),
        }

    def send(self, message: Message) -> None:
        if not self._home.socket.send(encode(message), self.peer):
            self._home.counts.undelivered += 1

    def say_again(self, said: Iterable[Message], next_seq: int) -> None:
        """What was said of one grant, but for the chunks decode has heard of."""
        for word in said:
            if type(word) is not ChunkDone or word.seq >= next_seq:
                self.send(word)

    def close_grant(self, grant: int, said: tuple[Message, ...]) -> None:
        """Remember how a grant ended, so that it can be said again and nothing resurrects it (I6)."""
        self.grants.pop(grant, None)
        self.closed[grant] = said
        while len(self.closed) > self._home.bounds.closed_grants:
            evicted, words = self.closed.popitem(last=False)
            if any(type(word) is AbortAck and not word.drained for word in words):
                self.doubtful.add(evicted)
            self.low_water = max(self.low_water, evicted + 1)

    def drained(self, grant: int) -> bool:
        """Nothing of a grant that is not open can land any more."""
        said = self.closed.get(grant, ())
        return grant not in self.doubtful and all(word.drained for word in said if type(word) is AbortAck)

    @property
    def all_drained(self) -> bool:
        """No ended grant is in doubt: it may be forgotten that they were, and said of any that nothing can land."""
        return not self.doubtful and all(self.drained(grant) for grant in self.closed)

    def settle(self, below: int) -> None:
        """Decode needs nothing said again below this grant."""
        while self.closed and next(iter(self.closed)) < below:
            self.closed.popitem(last=False)
        self.doubtful = {g for g in self.doubtful if g >= below}
        if below > self.low_water and not any(g < below for g in self.grants):
            self.low_water = below
