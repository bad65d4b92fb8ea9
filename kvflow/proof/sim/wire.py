"""Control network in virtual time: frames arrive in order, unless a fault strikes."""

from __future__ import annotations

import random
from typing import TypeVar

from kvflow.proof.sim.faults import Faults, spoilt
from kvflow.proof.sim.loop import Process, current_process
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.times import DELAY_S, FRAME_S, TICK_S
from kvflow.transports.control.memory import DealerSocket, Frame, Network, RouterSocket

Socket = TypeVar("Socket", RouterSocket, DealerSocket)


class Wire(Network):
    """All links of one simulated cluster."""

    def __init__(self, oracle: Oracle, faults: Faults) -> None:
        super().__init__()
        self.delivered = 0
        self.cut_controls: set[str] = set()  # control addresses that are cut off
        self.cut_peers: set[bytes] = set()  # peer ids of decodes that are cut off
        # Frames that wait and later arrive in a burst, by control address or peer id.
        self.jammed: dict[str | bytes, list[Frame]] = {}
        self._oracle, self._faults = oracle, faults
        self._last_at: dict[tuple[str, bytes, bool], float] = {}
        self._owners: list[tuple[Process | None, RouterSocket | DealerSocket]] = []

    def bind(self, host: str, port: int) -> tuple[RouterSocket, int]:
        socket, port = super().bind(host, port)
        return self._watch(socket), port

    def connect(self, control: str, incarnation: int) -> DealerSocket:
        return self._watch(super().connect(control, incarnation))

    def unplug(self, process: Process) -> None:
        for owner, socket in self._owners:
            if owner is process:
                self.leave(socket)

    def carry(self, frame: Frame) -> None:
        """Carry a frame. A fault may strike it, a cut link loses it, and a jammed link keeps it."""
        message = frame.message
        self._oracle.sent(frame, message)
        if frame.control in self.cut_controls or frame.peer in self.cut_peers:
            self._oracle.disturbed(frame)
            return
        for end in (frame.control, frame.peer):
            if end in self.jammed:
                self.jammed[end].append(frame)
                self._oracle.disturbed(frame)
                return
        loop = self._oracle.loop
        fault = self._faults.of_frame()
        link = frame.control, frame.peer, frame.to_prefill
        delay_s = loop.rng.uniform(*FRAME_S)
        if fault:
            self._oracle.trace(lambda: f"{fault} strikes {type(message).__name__}")
        if fault == "drop":
            self._oracle.disturbed(frame)
            return
        if fault == "reorder":
            # `_last_at` stays as it was, so that later frames of the link may overtake this one.
            loop.later(delay_s + loop.rng.uniform(*FRAME_S) * 3, self._deliver, frame)
            return
        if fault == "delay":
            self._oracle.disturbed(frame)
            delay_s += loop.rng.uniform(*DELAY_S)
            loop.later(delay_s, self._oracle.disturbed, frame)
        # Two frames at the same moment would have no order.
        at_s = max(loop.time() + delay_s, self._last_at.get(link, 0.0) + TICK_S)
        self._last_at[link] = at_s
        loop.later(at_s - loop.time(), self._deliver, frame)
        if fault == "duplicate":
            loop.later(at_s - loop.time() + loop.rng.uniform(*FRAME_S), self._deliver, frame)
        elif fault == "garbage":
            spoilt = garbage(loop.rng, frame)
            self._oracle.garbage.add(spoilt.data)
            loop.later(delay_s, self._deliver, spoilt)

    def unjam(self, end: str | bytes) -> None:
        """Deliver the waiting frames in one burst, in the order in which they were sent."""
        frames, now = self.jammed.pop(end, []), self._oracle.loop.time()
        links = {(frame.control, frame.peer, frame.to_prefill) for frame in frames}
        at_s = max([now, *(self._last_at.get(link, now) for link in links)]) + TICK_S
        self._last_at |= dict.fromkeys(links, at_s)
        for frame in frames:
            self._oracle.disturbed(frame)
        self._oracle.loop.later(at_s - now, self.deliver, frames)

    def deliver(self, frames: list[Frame]) -> None:
        for frame in frames:
            self._deliver(frame)

    def _deliver(self, frame: Frame) -> None:
        self.delivered += 1
        super()._deliver(frame)

    def _watch(self, socket: Socket) -> Socket:
        """Count the malformed frames that the node receives. The node's own count must be equal."""
        process = current_process()
        self._owners.append((process, socket))
        receive = socket.receive

        async def counted() -> list[tuple[bytes, bytes]]:
            burst = await receive()
            self._oracle.received(process, [data for _, data in burst])
            return burst

        socket.receive = counted  # type: ignore[method-assign]
        return socket


def garbage(rng: random.Random, frame: Frame) -> Frame:
    def is_message(data: bytes) -> bool:
        return frame._replace(data=data).message is not None

    return frame._replace(data=spoilt(rng, frame.data, is_message))
