"""How rooms end (I4, I5, I6, I7, I12): the sessions are watched from outside while a simulation runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvflow.handlers.decode_room import DecodeSession
from kvflow.handlers.link import Link
from kvflow.handlers.prefill_room import PrefillSession
from kvflow.protocols.errors import Code
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.ports import Landing
from kvflow.protocols.wire.codec import routing_id
from kvflow.testing.sim.loop import current_process
from kvflow.testing.sim.swap import swapped
from kvflow.testing.sim.truth import Key, Seen, Truth

HEAR_S = 1.0  # the other side of a failed room hears of it within so long while the link is up
PATIENCE_S = 2.2  # silence for so long is no wonder when something has happened
RECOVER_S = 1.2  # and within so long after the link is up again
Session = DecodeSession | PrefillSession
_OVER_AT_DECODE = decode_room.TERMINAL | {DecodePhase.DRAINING}
_OVER_AT_PREFILL = prefill_room.TERMINAL | {PrefillPhase.DRAINING}


class Endings:
    """Every session of one run, by the promise it was opened under."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.loop = truth.loop
        self.count: dict[str, int] = {}
        self._decodes: dict[Key, DecodeSession] = {}
        self._prefills: dict[Key, PrefillSession] = {}
        self._over_at_s: dict[Session, float] = {}
        self._halves: dict[tuple[int, int], PrefillSession] = {}  # (incarnation, room): the engine's latest

    # --- what sessions do

    def at_decode(self, session: DecodeSession, before: decode_room.DecodeRoom) -> None:
        now, node = session.state, self.truth.by_process[current_process()]
        if before is now:
            return
        if before.phase is DecodePhase.BOOTSTRAPPING:
            for link in session.links:
                key = Key(link.source, node.incarnation, session.grant.number)
                if key in self._decodes:
                    self.truth.broken("I6", f"{key} is opened again")
                self._decodes[key] = session
                self._look(key)
        self._one_ending(f"room {session.room} at decode", before, now, decode_room.TERMINAL)
        if before.phase not in _OVER_AT_DECODE and now.phase in _OVER_AT_DECODE:
            self._over_at_s[session] = self.loop.time()
            self._ended("decode", now.phase.name, now.cause)
            keys = [(link.source, session.room) for link in session.links]
            halves = [self._halves[key] for key in keys if key in self._halves]
            self._not_for_nothing(session, halves, session.links, node)
            if now.phase is DecodePhase.SUCCESS:
                self.truth.landed(session, session._landed.result())
            elif not session._landed.done():
                self.truth.broken("I4", f"room {session.room} ended at decode, its client was not told")
            for link in session.links:
                self._look(Key(link.source, node.incarnation, session.grant.number))

    def at_prefill(self, session: PrefillSession, before: prefill_room.PrefillRoom) -> None:
        now, node = session.state, self.truth.by_process[current_process()]
        if session.prompt is not None:
            self._halves[node.incarnation, session.room] = session
        if before is now:
            return
        self._one_ending(f"room {session.room} at prefill", before, now, prefill_room.TERMINAL)
        key = _key_of(session)
        if before.phase not in _OVER_AT_PREFILL and now.phase in _OVER_AT_PREFILL:
            self._over_at_s[session] = self.loop.time()
            self._ended("prefill", now.phase.name, now.cause)
            if session.prompt is not None and not session._done.done():
                self.truth.broken("I4", f"room {session.room} ended at prefill, its engine was not told")
            if key is not None:
                self._look(key)
                decode, target = self._decodes[key], self.truth.by_incarnation[key.target]
                self._not_for_nothing(session, [decode], [k for k in decode.links if k.source == key.source], target)
        if key is not None and now.phase in prefill_room.TERMINAL and before.phase not in prefill_room.TERMINAL:
            writes = self.truth.writes.get(key, ())
            if any(write.landing is None for write in writes):
                self.truth.broken("I12", f"room {session.room} has ended at prefill while a write of it runs")
            if now.phase is PrefillPhase.SUCCESS and any(write.landing is not Landing.LANDED for write in writes):
                self.truth.broken("I3", f"room {session.room} succeeds at prefill over a write that has not landed")

    def bound(self, session: PrefillSession) -> None:
        """Decode's half has come to prefill."""
        key = _key_of(session)
        assert key is not None
        if key in self._prefills or key in self.truth.acked:
            self.truth.broken("I6", f"{key} opens room {session.room} at prefill, and was closed before")
        self._prefills[key] = session

    def _not_for_nothing(
        self, session: Session, others: Sequence[Session], links: Sequence[Link], target: Seen
    ) -> None:
        """A peer is given up when something has happened between the two, or when one of `others` gave up its own."""
        cause = session.state.cause
        if cause is None or cause.code is not Code.PEER_LOST or any(other.state.cause == cause for other in others):
            return
        if all(self._fine(self.truth.by_incarnation[link.source], target, link.control) for link in links):
            side = "decode" if isinstance(session, DecodeSession) else "prefill"
            self.truth.broken("I4", f"room {session.room} at {side}: {cause}; nothing has happened to it")

    def _one_ending(self, who: str, before: Any, now: Any, terminal: frozenset[Any]) -> None:
        if before.phase in terminal and now.phase is not before.phase:
            self.truth.broken("I4", f"{who} ended {before.phase.name} and now is {now.phase.name}")
        if before.cause is not None and now.cause != before.cause:
            self.truth.broken("I4", f"{who}: first {before.cause}, then {now.cause}")

    def _ended(self, role: str, phase: str, cause: object) -> None:
        name = f"{role} {phase.lower()}" if cause is None else f"{role} {cause.code}"  # type: ignore[attr-defined]
        self.count[name] = self.count.get(name, 0) + 1

    # --- both sides of a failure

    def _look(self, key: Key) -> None:
        self.loop.later(HEAR_S + 1e-6, self._both_know, key, self.loop.time())

    def _both_know(self, key: Key, since_s: float) -> None:
        """A room that has failed on one side has ended on the other, or the link between them was not up."""
        source, target = (self.truth.by_incarnation[inc] for inc in (key.source, key.target))
        decode, prefill = self._decodes.get(key), self._prefills.get(key)
        if decode is None or not self._both_live(source, target):
            return
        if prefill is None:
            prefill = self._halves.get((key.source, decode.room))
            if prefill is None or prefill.target is not None or prefill.prompt != (decode.prompt_tokens, decode.digest):
                return
        failed_here, failed_there = decode.state.cause is not None, prefill.state.cause is not None
        if not (failed_here or failed_there):
            return
        if decode.state.phase in _OVER_AT_DECODE and prefill.state.phase in _OVER_AT_PREFILL:
            return
        if self._over_at_s.get(decode if failed_here else prefill, 0.0) > since_s:
            return  # just now: it is looked at again
        link = next(link for link in decode.links if link.source == key.source)
        trouble_s = self._trouble(source, target, link.control)
        if trouble_s > since_s:
            wait_s = trouble_s + RECOVER_S - self.loop.time()
            if wait_s > 0:
                self.loop.later(wait_s + 1e-6, self._both_know, key, trouble_s)
                return
        where, other = ("decode", prefill.state) if failed_here else ("prefill", decode.state)
        self.truth.broken("I4", f"room {decode.room} has failed at {where}, the other side is still {other.phase.name}")

    def _fine(self, source: Seen, target: Seen, control: str) -> bool:
        """Both live and nothing has happened to the link between them for longer than patience lasts."""
        quiet_s = self.loop.time() - self._trouble(source, target, control)
        return self._both_live(source, target) and quiet_s > PATIENCE_S

    def _both_live(self, *sides: Seen) -> bool:
        return not any(side.process.dead or side.outcast for side in sides)

    def _trouble(self, source: Seen, target: Seen, control: str) -> float:
        """When something last happened to the link between the two, or to one of them."""
        if source.process.parked is not None or target.process.parked is not None:
            return self.loop.time()
        return max(
            self.truth.trouble.get((control, routing_id(target.incarnation)), -1.0),
            source.troubled_at_s,
            target.troubled_at_s,
        )


@contextmanager
def observed(endings: Endings) -> Iterator[None]:
    """Every session in this process reports to `endings`."""
    feed_decode, feed_prefill = DecodeSession.feed, PrefillSession.feed
    bind, begin_write = PrefillSession.bind, PrefillSession._begin_write

    def at_decode(session: DecodeSession, event: decode_room.DecodeEvent) -> None:
        before = session.state
        feed_decode(session, event)
        endings.at_decode(session, before)

    def at_prefill(session: PrefillSession, event: prefill_room.PrefillEvent) -> None:
        before = session.state
        feed_prefill(session, event)
        endings.at_prefill(session, before)

    def bound(session: PrefillSession, *arguments: Any) -> None:
        bind(session, *arguments)
        endings.bound(session)

    def writing(session: PrefillSession, *arguments: Any) -> Any:
        endings.truth.writing = session
        try:
            return begin_write(session, *arguments)
        finally:
            endings.truth.writing = None

    with ExitStack() as swaps:
        swaps.enter_context(swapped(DecodeSession, "feed", at_decode))
        swaps.enter_context(swapped(PrefillSession, "feed", at_prefill))
        swaps.enter_context(swapped(PrefillSession, "bind", bound))
        swaps.enter_context(swapped(PrefillSession, "_begin_write", writing))
        yield


def _key_of(session: PrefillSession) -> Key | None:
    if session.target is None:
        return None
    return Key(session._home.incarnation, session.target.incarnation, session.grant)
