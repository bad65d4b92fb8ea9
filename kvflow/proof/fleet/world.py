"""The fleet: its nodes, the network between them, the router, and the accidents."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from kvflow.proof.bare.clock import Clock
from kvflow.proof.fleet.nodes import AnyHost, DecodeHost, PrefillHost, Scene, peer_id_of
from kvflow.proof.fleet.plan import MAX_PROMPT_PAGES, Plan
from kvflow.protocols.wire.messages import Incarnation
from kvflow.telemetry.counters import Counts

FRAME_S = 0.001  # every frame takes as long, so the frames of a link stay in order
DELAY_S = 0.4  # a delayed frame is overtaken by those behind it
SPREAD_S = 0.05  # the two halves of a room arrive within this time
LEAVE_S, FAIL_S = (0.0, 2.0), (0.0, 1.0)


class World(Scene):
    """All nodes of one run."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.rng, self.clock = plan, random.Random(seed), Clock()
        # Rooms are counted by side, because a counter per node would take more memory than the
        # endpoints.
        self.counts = Counts(), Counts()
        self.seen: Counter[str] = Counter()
        self.unproven: set[tuple[int, int]] = set()  # grants with a write without proof
        self.partitioned = False
        self.prefills = [
            PrefillHost(self, number, self._incarnation()) for number in range(plan.prefills)
        ]
        self._by_control = {host.control: number for number, host in enumerate(self.prefills)}
        self.decodes = [
            DecodeHost(self, number, self._incarnation()) for number in range(plan.decodes)
        ]
        self._by_peer_id = {peer_id_of(host): host for host in self.decodes}
        self._by_incarnation = {int(host.incarnation): host for host in self.decodes}

    def _incarnation(self) -> Incarnation:
        return Incarnation(self.rng.getrandbits(63) | 1)

    # --- the network

    def to_prefill(self, sender: DecodeHost, control: str, frame: bytes) -> None:
        receiver = self.prefills[self._by_control[control]]
        if not self.are_apart(sender, receiver):
            self._carry(self._at_prefill, control, peer_id_of(sender), frame)

    def to_decode(self, sender: PrefillHost, peer_id: bytes, frame: bytes) -> None:
        receiver = self._by_peer_id.get(peer_id)
        if receiver is not None and not self.are_apart(receiver, sender):
            self._carry(self._at_decode, receiver, sender.control, frame)

    def _carry(self, deliver: Callable[..., object], *what: object) -> None:
        plan, dice, clock = self.plan, self.rng.random(), self.clock
        self.seen["frames"] += 1
        if dice < plan.drops:
            return
        delay_s = FRAME_S
        if (dice := dice - plan.drops) < plan.delays:
            delay_s += DELAY_S * self.rng.random()
        elif dice - plan.delays < plan.repeats:
            clock.later(FRAME_S + DELAY_S * self.rng.random(), None, deliver, *what)
        clock.later(delay_s, None, deliver, *what)

    def _at_prefill(self, control: str, peer_id: bytes, frame: bytes) -> None:
        # Whoever has the address now receives the frame.
        host = self.prefills[self._by_control[control]]
        if host.alive:
            host.read(peer_id, frame)

    @staticmethod
    def _at_decode(host: DecodeHost, control: str, frame: bytes) -> None:
        if host.alive:
            host.read(control, frame)

    def are_apart(self, decode: DecodeHost, prefill: PrefillHost) -> bool:
        """Return True while the partition is between two nodes: a quarter of the decodes reaches
        only the first quarter of the prefills.
        """
        return (
            self.partitioned
            and 4 * decode.number < self.plan.decodes
            and 4 * prefill.number >= self.plan.prefills
        )

    def write_fails(self) -> bool:
        return self.rng.random() < self.plan.write_errors

    def decode_of(self, incarnation: int) -> DecodeHost | None:
        return self._by_incarnation.get(incarnation)

    # --- rooms

    def arrive(self, room: int) -> None:
        """Let a router send both halves of a room to a pair of nodes."""
        plan, rng, later = self.plan, self.rng, self.clock.later
        decode = self.decodes[rng.randrange(plan.decodes)]
        if rng.random() < plan.strays:
            number = rng.randrange(plan.prefills)
        else:
            stride = max(1, plan.prefills // plan.partners)
            number = (decode.number + stride * rng.randrange(plan.partners)) % plan.prefills
        prefill = self.prefills[number]
        count = rng.randint(1, MAX_PROMPT_PAGES)
        leaves_after_s = rng.uniform(*LEAVE_S) if rng.random() < plan.leaves else None
        fails_after_s = rng.uniform(*FAIL_S) if rng.random() < plan.fails else None
        missing = rng.random()
        if missing >= plan.missing:
            begins = room, count, prefill.info, leaves_after_s
            later(SPREAD_S * rng.random(), decode, decode.begin, *begins)
        if not plan.missing <= missing < 2 * plan.missing:
            later(SPREAD_S * rng.random(), prefill, prefill.begin, room, count, fails_after_s)

    # --- accidents

    def kill(self, host: AnyHost) -> None:
        """End a node's process. Its rooms end with it."""
        host.die()
        if isinstance(host, DecodeHost):
            del self._by_peer_id[peer_id_of(host)], self._by_incarnation[host.incarnation]
            self.seen["decode halves that died"] += sum(not h.over for h in host.rooms.values())
        else:
            self.seen["prefill halves that died"] += len(host.legs)

    def start(self, host: AnyHost) -> None:
        """Start a new process in the place of a dead one, at the same address."""
        if isinstance(host, DecodeHost):
            born = self.decodes[host.number] = DecodeHost(self, host.number, self._incarnation())
            self._by_peer_id[peer_id_of(born)] = self._by_incarnation[born.incarnation] = born
        else:
            self.prefills[host.number] = PrefillHost(self, host.number, self._incarnation())

    def lose_rack(self) -> None:
        """Lose one rack at once. Nobody can see its processes, so an operator declares its prefills
        dead; later the rack is back.
        """
        plan = self.plan
        rack = self.rng.randrange(plan.racks)
        lost: list[AnyHost] = [
            *self.prefills[rack :: plan.racks],
            *self.decodes[rack :: plan.racks],
        ]
        for host in lost:
            self.kill(host)
            self.clock.later(plan.rack_down_s, None, self.start, host)
        dead = {int(host.incarnation) for host in lost if isinstance(host, PrefillHost)}
        self.clock.later(plan.declared_after_s, None, self._declare_dead, dead)
        self.seen["nodes of the lost rack"] = len(lost)

    def _declare_dead(self, dead: set[int]) -> None:
        for host in self.decodes:
            if host.alive:
                host.declare_dead(dead)

    def restart_all(self) -> None:
        """Kill every process at once. Each starts again within some seconds."""
        every: list[AnyHost] = [*self.prefills, *self.decodes]
        for host in every:
            if host.alive:
                self.kill(host)
                after_s = self.plan.restart_within_s * self.rng.random()
                self.clock.later(after_s, None, self.start, host)
                self.seen["nodes restarted"] += 1

    def part(self) -> None:
        self.partitioned = True
        self.clock.later(self.plan.partition_s, None, self.join)

    def join(self) -> None:
        self.partitioned = False
