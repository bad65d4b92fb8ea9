"""Links between nodes: frames take a moment and arrive in order, unless a fault strikes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from kvflow.proof.bare.clock import Clock
from kvflow.proof.bare.holds import Who
from kvflow.proof.rules.words import worded
from kvflow.proof.sim.faults import Faults, spoilt
from kvflow.proof.sim.times import DELAY_S, FRAME_S, TICK_S
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.codec import parse_at_decode, parse_at_prefill, routing_id
from kvflow.protocols.wire.messages import Incarnation, Message

_FRAME_LOW, _FRAME_SPAN = FRAME_S[0], FRAME_S[1] - FRAME_S[0]
Burst = list[tuple[Any, bytes, bool]]
"""Frames as (origin, bytes, spoilt). The origin is a routing id at prefill, and the dialled key at
decode.
"""


class End(Who, Protocol):
    parked: list[Any] | None
    unread: Burst  # frames received since it was halted

    def read(self, burst: Burst) -> None:
        """Handle the frames that wait at the end's sockets."""

    def say(self, what: str) -> None: ...


Jammed = list[tuple[str, End, bool, bytes]]


class Wire:
    """All links of one world. A link connects a prefill's control address and a decode."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        faults: Faults,
        disturbed: Callable[[str, int], None],
        *,
        traced: bool,
    ) -> None:
        """`disturbed` is called for each disturbance, from which both ends have to recover."""
        self.clock, self.rng, self.faults, self._traced = clock, rng, faults, traced
        self._disturbed = disturbed
        self.routers: dict[str, End] = {}  # node that answers now, by address
        # Keys that decode dialled, by link. The latest key is the last one.
        self.lines: dict[tuple[str, int], list[PeerKey]] = {}
        self.cut: set[str | int] = set()  # control addresses and decodes that are cut off
        self.jammed: dict[str | int, Jammed] = {}  # frames held back for a burst, by end
        self._last_at: dict[tuple[str, int, bool], float] = {}

    def carry(self, sender: End, control: str, decode: End, frame: bytes) -> None:
        clock, rng, peer, to_prefill = self.clock, self.rng, decode.incarnation, sender is decode
        if self._traced:
            hearer = self.routers.get(control) if to_prefill else decode
            said = worded(parsed(frame, to_prefill))
            sender.say(f"to {hearer.name if hearer else 'nobody'}: {said}")
        if self.cut and (control in self.cut or peer in self.cut):
            return self.disturbed(control, decode)
        if self.jammed:
            for end in (control, peer):
                if end in self.jammed:
                    self.jammed[end].append((control, decode, to_prefill, frame))
                    return self.disturbed(control, decode)
        now, random_ = clock.now, rng.random
        at_s = now + _FRAME_LOW + _FRAME_SPAN * random_()
        fault = self.faults.of_frame()
        if fault:
            if self._traced:
                sender.say(f"{fault} strikes")
            if fault == "drop":
                return self.disturbed(control, decode)
            if fault == "reorder":
                # `_last_at` stays as it was, so that later frames may overtake this one.
                at_s += _FRAME_SPAN * 3 * random_()
                return clock.later(
                    at_s - now, None, self._deliver, control, decode, to_prefill, frame
                )
            if fault == "delay":
                self.disturbed(control, decode)
                at_s += rng.uniform(*DELAY_S)
                clock.later(at_s - now, None, self.disturbed, control, decode)
        link = control, peer, to_prefill
        # Frames of a link arrive in the order in which they were sent, at least a tick apart.
        last_s = self._last_at.get(link, 0.0) + TICK_S
        if at_s < last_s:
            at_s = last_s
        self._last_at[link] = at_s
        clock.later(at_s - now, None, self._deliver, control, decode, to_prefill, frame)
        if fault == "duplicate":
            late_s = at_s - now + rng.uniform(*FRAME_S)
            clock.later(late_s, None, self._deliver, control, decode, to_prefill, frame)
        elif fault == "garbage":
            data = spoilt(rng, frame, lambda found: parsed(found, to_prefill) is not None)
            clock.later(at_s - now, None, self._deliver, control, decode, to_prefill, data, True)
        return None

    def unjam(self, end: str | int) -> None:
        """Deliver the frames that were held back at `end` in one burst, in their original order."""
        frames, now = self.jammed.pop(end, []), self.clock.now
        links = {
            (control, decode.incarnation, to_prefill) for control, decode, to_prefill, _ in frames
        }
        at_s = max([now, *(self._last_at.get(link, now) for link in links)]) + TICK_S
        self._last_at |= dict.fromkeys(links, at_s)
        for control, decode, _, _ in frames:
            self.disturbed(control, decode)
        self.clock.later(at_s - now, None, self.deliver, frames)

    def dial(self, key: PeerKey, decode: End) -> None:
        self.lines.setdefault((key.control, decode.incarnation), []).append(key)

    def hang_up(self, key: PeerKey, decode: End) -> None:
        keys = self.lines.get((key.control, decode.incarnation), [])
        if key in keys:
            keys.remove(key)

    def dialled_by(self, decode: End) -> bool:
        return any(keys and link[1] == decode.incarnation for link, keys in self.lines.items())

    def unplug(self, node: End) -> None:
        for control in [control for control, router in self.routers.items() if router is node]:
            del self.routers[control]
        for link in [link for link in self.lines if link[1] == node.incarnation]:
            del self.lines[link]

    def disturbed(self, control: str, decode: End) -> None:
        self._disturbed(control, decode.incarnation)

    def deliver(self, frames: Jammed) -> None:
        """Deliver the frames now, one burst for each receiver."""
        bursts: dict[End, Burst] = {}
        for control, decode, to_prefill, frame in frames:
            if (found := self._hearer(control, decode, to_prefill)) is not None:
                node, origin = found
                bursts.setdefault(node, []).append((origin, frame, False))
        for node, burst in bursts.items():
            self._hand_over(node, burst)

    def _deliver(
        self, control: str, decode: End, to_prefill: bool, frame: bytes, spoilt: bool = False
    ) -> None:
        if (found := self._hearer(control, decode, to_prefill)) is not None:
            node, origin = found
            self._hand_over(node, [(origin, frame, spoilt)])

    def _hearer(self, control: str, decode: End, to_prefill: bool) -> tuple[End, Any] | None:
        if to_prefill:
            node = self.routers.get(control)
            return None if node is None else (node, routing_id(Incarnation(decode.incarnation)))
        keys = self.lines.get((control, decode.incarnation))
        return (decode, keys[-1]) if keys else None

    @staticmethod
    def _hand_over(node: End, burst: Burst) -> None:
        if node.parked is None:
            return node.read(burst)
        # `unplug` removes dead nodes, so this one is halted. One parked call reads all frames.
        if not node.unread:
            node.parked.append((node.read, (node.unread,)))
        node.unread += burst
        return None


def parsed(frame: bytes, to_prefill: bool) -> Message | None:
    try:
        return parse_at_prefill(frame) if to_prefill else parse_at_decode(frame)
    except WireError:
        return None
