"""The links between nodes: frames take a moment and come in order, unless a fault strikes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.codec import parse_at_decode, parse_at_prefill
from kvflow.protocols.wire.messages import Bootstrap, Message
from kvflow.testing.sim.times import DELAY_S, FRAME_S, TICK_S

if TYPE_CHECKING:
    from kvflow.testing.bare.decode import Decode
    from kvflow.testing.bare.node import Node
    from kvflow.testing.bare.prefill import Prefill
    from kvflow.testing.bare.world import World

_FRAME_LOW, _FRAME_SPAN = FRAME_S[0], FRAME_S[1] - FRAME_S[0]
_DULL = {"source", "target", "layout", "endpoint", "wire_version", "prompt_digest", "handoff", "checksum", "asked"}
_BOOTSTRAP = 3  # its tag

Jammed = list[tuple[str, "Decode", bool, bytes]]


class Wire:
    """Every link of one world. A link is a prefill's control address and a decode."""

    def __init__(self, world: World) -> None:
        self.world, self.clock = world, world.clock
        self.routers: dict[str, Prefill] = {}  # who answers at an address now
        self.cut: set[str | int] = set()  # controls and decodes that nobody reaches
        self.jammed: dict[str | int, Jammed] = {}  # what waits, to arrive in a burst
        self.trouble: dict[tuple[str, int], float] = {}  # per link: when something last happened to it
        self._last_at: dict[tuple[str, int, bool], float] = {}

    def carry(self, control: str, decode: Decode, to_prefill: bool, frame: bytes) -> None:
        world, clock, peer = self.world, self.clock, decode.incarnation
        if to_prefill and frame[1] == _BOOTSTRAP:
            message = parse_at_prefill(frame)
            assert isinstance(message, Bootstrap)
            world.oracle.lent(decode, message.grant, message.pages)
        if world.tell is not None:
            world.tell(clock.now, decode.name if to_prefill else control, worded(frame, to_prefill))
        if self.cut and (control in self.cut or peer in self.cut):
            return self.disturbed(control, decode)
        if self.jammed:
            for end in (control, peer):
                if end in self.jammed:
                    self.jammed[end].append((control, decode, to_prefill, frame))
                    return self.disturbed(control, decode)
        now, random_ = clock.now, world.rng.random
        at_s = now + _FRAME_LOW + _FRAME_SPAN * random_()
        fault = world.faults.of_frame()
        if fault:
            if world.tell is not None:
                world.tell(now, "", f"{fault} strikes")
            if fault == "drop":
                return self.disturbed(control, decode)
            if fault == "reorder":
                at_s += _FRAME_SPAN * 3 * random_()
                return clock.later(at_s - now, None, self._deliver, control, decode, to_prefill, frame)
            if fault == "delay":
                self.disturbed(control, decode)
                at_s += world.rng.uniform(*DELAY_S)
                clock.later(at_s - now, None, self.disturbed, control, decode)
        link = control, peer, to_prefill
        last_s = self._last_at.get(link, 0.0) + TICK_S
        if at_s < last_s:
            at_s = last_s
        self._last_at[link] = at_s
        clock.later(at_s - now, None, self._deliver, control, decode, to_prefill, frame)
        if fault == "duplicate":
            late_s = at_s - now + world.rng.uniform(*FRAME_S)
            clock.later(late_s, None, self._deliver, control, decode, to_prefill, frame)
        elif fault == "garbage":
            spoilt = garbage(world.rng, frame, to_prefill)
            clock.later(at_s - now, None, self._deliver, control, decode, to_prefill, spoilt, True)
        return None

    def unjam(self, end: str | int) -> None:
        """What has waited arrives at once, in the order in which it was sent."""
        for number, (control, decode, to_prefill, frame) in enumerate(self.jammed.pop(end, ()), 1):
            self.disturbed(control, decode)
            link = control, decode.incarnation, to_prefill
            now = self.clock.now
            at_s = max(now + number * TICK_S, self._last_at.get(link, 0.0) + TICK_S)
            self._last_at[link] = at_s
            self.clock.later(at_s - now, None, self._deliver, control, decode, to_prefill, frame)

    def disturbed(self, control: str, decode: Decode) -> None:
        """Something happened to that link which both ends have to recover from."""
        self.trouble[control, decode.incarnation] = self.clock.now

    def _deliver(self, control: str, decode: Decode, to_prefill: bool, frame: bytes, spoilt: bool = False) -> None:
        node: Node | None
        origin: object
        if to_prefill:
            node, origin = self.routers.get(control), decode.peer_id
        else:
            keys = decode.lines.get(control)
            node, origin = (decode, keys[-1]) if keys else (None, None)
        if node is None:
            return
        if node.parked is not None:
            node.parked.append((node.receive, (origin, frame, spoilt)))
        else:
            node.receive(origin, frame, spoilt)


def parsed(frame: bytes, to_prefill: bool) -> Message | None:
    """None for bytes that are no message."""
    try:
        return parse_at_prefill(frame) if to_prefill else parse_at_decode(frame)
    except WireError:
        return None


def garbage(rng: random.Random, frame: bytes, to_prefill: bool) -> bytes:
    """A frame cut short, with a byte changed or with more behind it, or nothing of the kind; never a message."""
    at = rng.randrange(len(frame))
    spoilt = (frame[:at], frame[:at] + bytes([frame[at] ^ rng.randint(1, 255)]) + frame[at + 1 :], rng.randbytes(at))
    found = rng.choice(spoilt)
    return found if parsed(found, to_prefill) is None else b"\xc1" + found


def worded(frame: bytes, to_prefill: bool) -> str:
    """A message as people want to read it: without what is the same in all of them."""
    message = parsed(frame, to_prefill)
    if message is None:
        return "what is no message"
    shown = {name: getattr(message, name) for name in message.__struct_fields__ if name not in _DULL}
    if type(message) is Bootstrap:
        shown["pages"] = memoryview(message.pages).cast("i").tolist()
    return f"{type(message).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"
