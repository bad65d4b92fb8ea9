"""The nodes of one run, each a process on the virtual loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.rules.both_sides import is_linked
from kvflow.proof.sim.dp_groups import DpGroup
from kvflow.proof.sim.engine import Named
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.lies import another_life, from_long_ago
from kvflow.proof.sim.loop import Process, VirtualLoop
from kvflow.proof.sim.oracle import Oracle, Seen
from kvflow.proof.sim.pages import Books, another_store, watch
from kvflow.proof.sim.plane import PacedPlane
from kvflow.proof.sim.scenario import OWN_GROUP, WORD
from kvflow.proof.sim.snapshots import Snapshots
from kvflow.proof.sim.staging import Staged
from kvflow.proof.sim.thread_engine import DecodeThreadEngine, PrefillThreadEngine
from kvflow.proof.sim.times import DELAY_S, THREAD_S
from kvflow.proof.sim.variety import Variety
from kvflow.proof.sim.wire import Wire
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.ports import PageStore
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts
from kvflow.testing.shards import shard_layout
from kvflow.transports.control.memory import Frame
from kvflow.transports.data.fake import FakeNetwork

Engine = DecodeThreadEngine | PrefillThreadEngine


@dataclass(eq=False)
class Member:
    """One process of one node. Dead members stay in `Cluster.members`."""

    name: str
    process: Process
    node: PrefillNode | DecodeNode
    plane: PacedPlane
    seen: Seen
    group: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    snapshots: Snapshots | None = None  # None at a prefill
    cache: Any = None  # a `cached.NodeCache`, if nodes have caches
    engine: Engine | None = None  # set if the node's engine has no event loop
    leaving: bool = False

    @property
    def is_prefill(self) -> bool:
        return isinstance(self.node, PrefillNode)

    @property
    def counts(self) -> Counts:
        return self.node.counts

    @property
    def malformed(self) -> int:
        return self.seen.malformed

    @property
    def alive(self) -> bool:
        return not self.process.dead

    @property
    def up(self) -> bool:
        return self.alive and self.process.parked is None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self.process.run(asyncio.ensure_future, work)
        self.tasks.append(task)
        return task


class Cluster:
    def __init__(self, loop: VirtualLoop, oracle: Oracle, faults: Faults, variety: Variety) -> None:
        self.loop, self.oracle, self.faults, self.variety = loop, oracle, faults, variety
        # Groups of the data-parallel prefill, by number.
        self.data_parallel: Mapping[int, DpGroup] = {}
        self.wire = Wire(oracle, faults)
        self.planes = FakeNetwork()
        self.members: list[Member] = []
        # Decodes, and prefill groups, whose engines have no event loop.
        self.threaded: AbstractSet[int] = frozenset()
        self.threaded_groups: AbstractSet[int] = frozenset()
        self._pools: list[PagedPool] = []
        self.staged: dict[PagedPool, Staged] = {}

    def living(self, kind: type) -> list[Member]:
        return [
            m
            for m in self.members
            if m.alive and not m.leaving and not m.seen.displaced and isinstance(m.node, kind)
        ]

    def ranks(self, group: int) -> Sequence[RankInfo]:
        """Return a group's registry entries. A dead rank's entry stays until the rank restarts."""
        latest: dict[int, RankInfo] = {}
        for member in self.members:
            if member.group == group and isinstance(member.node, PrefillNode):
                latest[member.node.info.rank] = member.node.info
        return [latest[rank] for rank in sorted(latest)]

    def every_rank(self) -> Sequence[RankInfo]:
        return [info for group in self.data_parallel for info in self.ranks(group)]

    def named(self, group: int, how: str, dp_rank: int | None) -> Named:
        if how == OWN_GROUP:
            return Named(self.ranks(group), dp_rank)
        return Named("prefill" if how == WORD else self.every_rank(), dp_rank)

    async def _resolve(self, _: str) -> Sequence[RankInfo]:
        rng = self.loop.rng
        span_s = DELAY_S if self.faults.on and rng.random() < 0.2 else THREAD_S
        await asyncio.sleep(rng.uniform(*span_s))
        return self.every_rank()

    def start_prefill(
        self, group: int, rank: int, world_size: int, port: int = 0, after: Member | None = None
    ) -> Member:
        """Start a prefill rank. See `start_decode` for `after`."""
        name = f"prefill {group}.{rank}" if world_size > 1 else f"prefill {group}"
        dp_group = self.data_parallel.get(group, DpGroup())
        process, pool, plane, books = self._parts(name, after, (rank, world_size))
        incarnation = self._incarnation()
        options: dict[str, Any] = {
            "port": port,
            "rank": rank,
            "world_size": world_size,
            "dp_rank": dp_group.dp_rank,
            "dp_size": dp_group.dp_size,
            "bind": self.wire.bind,
            **self._options(incarnation),
        }
        if group in self.threaded_groups:
            engine = PrefillThreadEngine(
                name, process, pool, plane, books, self.oracle, self.faults.of_take, **options
            )
            return self._join(name, process, engine.node, plane, books, group, None, engine)
        pages = self._store_after(after, pool, incarnation)
        node = PrefillNode(pool, plane, pages=pages, **options)
        return self._join(name, process, node, plane, books, group)

    def start_decode(self, number: int, after: Member | None = None) -> Member:
        """Start a decode. With `after`, it takes over a closed node's pool and unproven loans."""
        name = f"decode {number}"
        process, pool, plane, books = self._parts(name, after)
        incarnation = self._incarnation()
        options = {
            "resolve": self._resolve,
            "connect": self.wire.connect,
            **self._options(incarnation),
        }
        if number in self.threaded:
            engine = DecodeThreadEngine(
                name, process, pool, plane, books, self.oracle, self.faults.of_take, **options
            )
            return self._join(name, process, engine.node, plane, books, number, None, engine)
        staged = self._staged(name, pool, books)
        staging = None if staged is None else staged.staging
        pages = self._store_after(after, pool, incarnation)
        node = DecodeNode(pool, plane, pages=pages, staging=staging, **options)
        return self._join(name, process, node, plane, books, number, staged)

    def _options(self, incarnation: int) -> dict[str, Any]:
        return {
            "timing": self.variety.timing,
            "bounds": self.variety.bounds,
            "verify_transfers": self.variety.verify,
            "incarnation": incarnation,
            "now": self.loop.time,
        }

    def _staged(self, name: str, pool: PagedPool, books: Books) -> Staged | None:
        """Return a pool's staging, if any. Nodes that use the pool in turn share that staging."""
        size_bytes = self.variety.staging_bytes
        if size_bytes and pool not in self.staged:
            self.staged[pool] = Staged(name, pool, books, size_bytes, self.oracle, self.faults)
        return self.staged.get(pool)

    @staticmethod
    def _store_after(after: Member | None, pool: PagedPool, incarnation: int) -> PageStore | None:
        # A bit of the incarnation decides, because one more draw would change all later draws.
        return another_store(pool) if after is not None and incarnation & 2 else None

    # --- what can happen to a node

    def everyone(self) -> list[Member]:
        return list(self.members)

    def kill(self, member: Member) -> None:
        """Kill a node without warning. Fences can then prove its death."""
        self.oracle.trace(lambda: f"{member.name} dies")
        self.loop.kill(member.process)
        self.wire.unplug(member.process)
        member.plane.die()
        member.seen.books.lost = member.seen.lent.lost = True

    def leave(self, member: Member) -> None:
        """Close a node as an operator would. Its process ends when its requests are over."""
        self.oracle.trace(lambda: f"{member.name} leaves")
        member.leaving = True

        async def close() -> None:
            if member.engine is None:
                await member.node.close()
            else:
                await member.engine.close()
            if member.snapshots is not None:
                await member.snapshots.close()
            if tasks := [task for task in member.tasks if not task.done()]:
                await asyncio.wait(tasks)
            if member.engine is not None:
                member.engine.part()
            if member.cache is not None:
                await member.cache.close()
            # This is a task of the process, and the process must not end inside one of its tasks.
            self.loop.soon(self._left, member)

        member.process.run(asyncio.ensure_future, close())

    def _left(self, member: Member) -> None:
        if member.alive:
            self.oracle.trace(lambda: f"{member.name} has left")
            if isinstance(member.node, PrefillNode):
                endpoint, source = member.node.shell.endpoint, member.node.incarnation
                linked = [
                    decode.seen
                    for decode in self.living(DecodeNode)
                    if isinstance(decode.node, DecodeNode)
                    and is_linked(decode.node.shell.endpoint.peers, source)
                ]
                parted = endpoint.core.former.parted
                self.oracle.left(member.seen, member.node.control, parted, linked)
            elif member.node.shell.endpoint.rooms:
                self.oracle.broken("I5", f"{member.name} is closed, and has rooms")
            self.loop.kill(member.process)
            self.wire.unplug(member.process)

    def declare_dead(self) -> None:
        """Let an operator declare all ended processes dead, because no fence proves their death."""
        dead = {m.node.incarnation for m in self.members if not m.alive}
        for member in (*self.living(DecodeNode), *self.living(PrefillNode)):
            if not member.up:
                continue
            lines = member.node.peers()
            # A prefill's links lead to decodes, which write no pages. Only earlier writers count.
            if isinstance(member.node, PrefillNode):
                lines = [line for line in lines if line["phase"] == "earlier"]
            known = {int(line["incarnation"], 16) for line in lines}
            for incarnation in sorted(known & dead):
                member.process.run(member.node.declare_dead, incarnation, "it was seen to die")

    def tell_lies(self) -> None:
        sources = {member.node.incarnation: member for member in self.living(PrefillNode)}
        for member in self.living(DecodeNode):
            assert isinstance(member.node, DecodeNode)
            own = member.node.incarnation
            for peer in list(member.node.shell.endpoint.peers):
                source = sources.get(peer.key.incarnation)
                if source is None or peer.phase is not LinkPhase.UP:
                    continue
                assert isinstance(source.node, PrefillNode)
                where = peer.key.control, routing_id(own)
                self.wire.deliver([Frame(*where, False, data) for data in another_life(own, peer)])
                if (known := source.node.shell.endpoint.core.peers.get(own)) is not None:
                    said = from_long_ago(source.node.incarnation, known)
                    self.wire.deliver([Frame(*where, True, data) for data in said])

    def start_again(self, member: Member) -> Member:
        """Start a node again. A prefill keeps its address. A closed decode keeps its pool."""
        self.oracle.trace(lambda: f"{member.name} starts again")
        node = member.node
        if isinstance(node, DecodeNode):
            inherits = member.leaving and not member.seen.books.lost
            return self.start_decode(member.group, member if inherits else None)
        port = int(node.control.rsplit(":", 1)[1])
        return self.start_prefill(member.group, node.info.rank, node.info.world_size, port)

    def take_over(self, member: Member) -> Member:
        """Give a node's address to another process, while the node lives and its writes go on."""
        self.oracle.trace(lambda: f"{member.name} loses its address to another process")
        member.seen.displaced = True
        self.wire.unplug(member.process)
        return self.start_again(member)

    def switch_role(self, member: Member, number: int) -> Member:
        """Start the other role over a closed node's pool, as the group or decode `number`."""
        self.oracle.trace(lambda: f"{member.name} goes on in the other role")
        if isinstance(member.node, PrefillNode):
            return self.start_decode(number, member)
        # A node that returns to prefill gets its former address.
        before = self.ranks(number)
        port = int(before[0].control.rsplit(":", 1)[1]) if before else 0
        return self.start_prefill(number, 0, 1, port, after=member)

    def halt(self, member: Member) -> None:
        self.oracle.trace(lambda: f"{member.name} stands still")
        self.loop.halt(member.process)

    def resume(self, member: Member) -> None:
        self.oracle.trace(lambda: f"{member.name} goes on")
        member.seen.troubled_at_s = self.loop.time()
        self.loop.resume(member.process)

    def stall(self, member: Member, for_s: float) -> None:
        self.oracle.trace(lambda: f"the data plane of {member.name} stalls for {for_s:.2f} s")
        member.plane.stall(for_s)
        member.seen.stalled_until_s = self.loop.time() + for_s

    def jam(self, member: Member) -> None:
        self.oracle.trace(lambda: f"nothing gets through to {member.name} or from it")
        self.wire.jammed.setdefault(_end_of(member), [])

    def unjam(self, member: Member) -> None:
        self.oracle.trace(lambda: f"what has waited for {member.name} arrives")
        member.seen.troubled_at_s = self.loop.time()
        self.wire.unjam(_end_of(member))

    def cut(self, member: Member) -> None:
        self.oracle.trace(lambda: f"{member.name} is cut off")
        if isinstance(member.node, PrefillNode):
            self.wire.cut_controls.add(member.node.control)
        else:
            self.wire.cut_peers.add(routing_id(member.node.incarnation))

    def mend(self, member: Member) -> None:
        self.oracle.trace(lambda: f"{member.name} can be reached again")
        member.seen.troubled_at_s = self.loop.time()
        if isinstance(member.node, PrefillNode):
            self.wire.cut_controls.discard(member.node.control)
        else:
            self.wire.cut_peers.discard(routing_id(member.node.incarnation))

    def close(self) -> None:
        for staged in self.staged.values():
            staged.close()
        for member in self.members:
            if member.engine is not None:
                member.engine.abandon()
        for pool in self._pools:
            pool.close()
        for member in self.members:
            if member.snapshots is not None:
                member.snapshots.unmap()

    def _incarnation(self) -> int:
        return self.loop.rng.getrandbits(63) | 1

    def _parts(
        self, name: str, after: Member | None, share: tuple[int, int] = (0, 1)
    ) -> tuple[Process, PagedPool, PacedPlane, Books]:
        """Make the parts of a new node. `share` is its rank and the number of ranks."""
        plane = PacedPlane(self.planes, self.oracle, self.faults, self.variety.fences)
        if after is not None:
            return Process(name), after.seen.pool, plane, after.seen.books
        whole = self.variety.layout
        pool = PagedPool.allocate(shard_layout(whole, *share), shared=False)
        self._pools.append(pool)
        shared = None if share[1] == 1 else whole
        books = watch(pool, name, self.oracle, self.faults.of_take, shared)
        return Process(name), pool, plane, books

    def _join(
        self,
        name: str,
        process: Process,
        node: PrefillNode | DecodeNode,
        plane: PacedPlane,
        books: Books,
        group: int,
        staged: Staged | None = None,
        engine: Engine | None = None,
    ) -> Member:
        """Add a node to the cluster, and start it unless its engine has already started it."""
        lent = None if staged is None else staged.books
        seen = Seen(process, node.incarnation, books, node.pool, lent)
        member = Member(name, process, node, plane, seen, group)
        if isinstance(node, DecodeNode):
            host = self.variety.host
            member.snapshots = Snapshots(name, node.pool, books, host, self.oracle, self.faults)
        self.members.append(member)
        self.oracle.join(seen, plane.address)
        if isinstance(node, PrefillNode):
            self.oracle.dp_groups.joined(node.incarnation, group)
        member.engine = engine
        if engine is None:
            # In a simulation `start` waits for nothing, so one step of the coroutine completes it.
            start = node.start()
            with contextlib.suppress(StopIteration):
                process.run(start.send, None)
        if staged is not None and isinstance(node, DecodeNode):
            staged.serve(node)
        return member


def _end_of(member: Member) -> str | bytes:
    node = member.node
    return node.control if isinstance(node, PrefillNode) else routing_id(node.incarnation)
