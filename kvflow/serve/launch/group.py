"""A prefill over several ranks. The first rank has the HTTP server and starts the other ranks.

All ranks are processes on one machine. The group's sockets share a new key, which is not stored in
any file.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec

from kvflow.handlers.group import LeaderShell, MemberShell, OpenRoom
from kvflow.handlers.rooms import PrefillRoom
from kvflow.node import PrefillNode
from kvflow.protocols.errors import Cause, KvflowError, LostError
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember, TicketKey
from kvflow.protocols.ports import ControlSocket
from kvflow.protocols.wire.messages import Incarnation, Rank, RoomId
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.config.settings import Settings
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.following import StepFollower
from kvflow.serve.engine.ranks.group import PrefillGroup
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.ranks.loading import ready
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_steps import PrefillSteps
from kvflow.serve.http.group_service import GroupPrefillService
from kvflow.serve.launch.caching import prefix_cache
from kvflow.serve.launch.meeting import meeting_directory
from kvflow.serve.launch.parts import Parts, card_of, loaded
from kvflow.serve.launch.process import Ready, StopSignals, announce
from kvflow.serve.launch.ranks import PrefillRankSpec, RankProcesses, end_at_once
from kvflow.serve.launch.services import Control, bind_control, prefill_engine, prefill_node
from kvflow.transports.control.curve import ControlKey, open_new_key, read_key
from kvflow.transports.control.registry import RankTable
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.host.identity import own_identity, wait_dead

_HERE = "127.0.0.1"
_DRAIN_S = 5.0
_LOOK_S = 0.02  # interval at which the start checks whether all ranks joined


class _Rank(NamedTuple):
    node: PrefillNode
    parts: Parts
    cache: PrefixCache | None
    settings: Settings


@asynccontextmanager
async def group_over(
    settings: Settings, control: Control, table: RankTable
) -> AsyncGenerator[tuple[GroupPrefillService, Parts], None]:
    """Run a prefill over `settings.pp * settings.tp` ranks, without its HTTP server.

    Yield its service and the first rank's parts when all ranks are ready. Add each other rank to
    `table`. Raises: MisuseError.
    """
    async with AsyncExitStack() as stack:
        stack.callback(control[0].close)
        descriptor = open_new_key()
        stack.callback(os.close, descriptor)
        key = read_key(f"/dev/fd/{descriptor}")
        sockets = [bind_router(_HERE, 0, key) for _ in range(2)]
        for socket, _ in sockets:
            stack.callback(socket.close)
        spec = PrefillRankSpec(
            rank=0,
            stages=settings.pp,
            shards=settings.tp,
            attempt=0,
            group=f"tcp://{_HERE}:{sockets[0][1]}",
            steps=f"tcp://{_HERE}:{sockets[1][1]}",
            key=f"/dev/fd/{descriptor}",
            meeting=stack.enter_context(meeting_directory()),
            settings=settings,
        )
        first = _FirstRank(spec, table)
        processes = RankProcesses(
            spec,
            "prefill-rank",
            descriptors=(descriptor,),
            on_lost=first.lost,
            on_fatal=first.end_at_once,
        )
        stack.push_async_callback(processes.close)
        processes.start()
        rank = await _rank(spec, stack, control)
        yield await first.start(rank, sockets[0][0], sockets[1][0], key, stack), rank.parts


class _FirstRank:
    """The parts that only rank 0 has: the leaders of the group and the steps, and the service."""

    def __init__(self, spec: PrefillRankSpec, table: RankTable) -> None:
        self._spec, self._table = spec, table
        self._world_size = spec.stages * spec.shards
        self._complete = asyncio.Event()
        self._steps: StepLeader | None = None
        # `start` sets these before the step leader calls any method of this class.
        self._engine: PrefillEngine
        self._group: PrefillGroup

    async def start(
        self,
        rank: _Rank,
        group_socket: ControlSocket,
        steps_socket: ControlSocket,
        key: ControlKey | None,
        stack: AsyncExitStack,
    ) -> GroupPrefillService:
        settings, node, model = rank.settings, rank.node, rank.parts.model
        steps = self._steps = self._step_leader(rank.parts, steps_socket)
        engine = self._engine = prefill_engine(
            rank.parts, settings, rank.cache, lockstep=steps, samples=_samples(self._spec)
        )
        life = _life()
        leader = LeaderShell(
            GroupLeader(
                _life(), self._world_size, now=monotonic(), process=own_identity(), first=life
            ),
            socket=group_socket,
            refuse_room=node.refuse,
            wait_dead=wait_dead,
            counts=node.counts,
            now=monotonic,
        )
        stack.push_async_callback(leader.stop)

        def open_room(key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
            opened, _ = _open_room(node, room, request)
            service.opened(opened)
            group.opened(key.ticket, opened)
            return opened

        member = _member(self._spec, life, key, rank, open_room, stack)
        group = self._group = PrefillGroup(leader, member, engine, steps)
        service = GroupPrefillService(
            card_of(settings, model),
            node,
            engine,
            settings.request_timeout_s,
            group=group,
            own_status=lambda: _status(
                rank, 0, group.running, member, engine.failed_steps, steps.dropped
            ),
            others=steps.statuses,
            world=(self._spec.stages, self._spec.shards),
        )
        stack.push_async_callback(engine.close)
        # A step of the engine may wait for another rank, so the steps close before the engine.
        stack.push_async_callback(steps.close)
        stack.push_async_callback(group.close)
        stack.push_async_callback(member.drain, _DRAIN_S)
        stack.callback(leader.leave)
        await engine.start()
        await steps.start()
        await group.start()
        await self._complete.wait()
        while group.unavailable_reason:  # noqa: ASYNC110 - the members join by themselves
            await asyncio.sleep(_LOOK_S)
        return service

    def _step_leader(self, parts: Parts, socket: ControlSocket) -> StepLeader:
        return StepLeader(
            socket,
            world_size=self._world_size,
            shards=self._spec.shards,
            places=(parts.pool.pages.capacity, parts.pool.layout.num_rows),
            neighbours=parts.model.neighbours,
            on_hello=self._hello,
            on_opened=self._opened,
            on_token=self._first_token,
            on_agreed=self._agreed,
            on_broken=self._broken,
            on_ready=self._ready,
            on_unusable=self.end_at_once,
        )

    def end_at_once(self, error: BaseException) -> None:
        # The process ends without leaving its `with` blocks, so the directory is removed here.
        shutil.rmtree(self._spec.meeting, ignore_errors=True)
        end_at_once("prefill", error)

    def lost(self, rank: int, why: str) -> None:
        if self._steps is not None:
            self._steps.lost(rank, why)

    def _hello(self, hello: wire.Hello) -> None:
        info, model = hello.info, self._spec.settings.model_name
        self._table.put(
            RankInfo(
                hello.rank,
                self._world_size,
                info.incarnation,
                info.control,
                info.backend,
                model,
                info.pool,
            )
        )

    def _opened(self, rank: int, ticket: int) -> None:
        self._group.opened_at(rank, ticket)

    def _first_token(self, ticket: int, token: TokenOut) -> None:
        self._group.first_token(ticket, token)

    def _agreed(self, ticket: int, tokens: int) -> None:
        self._group.agreed(ticket, tokens)

    def _broken(self, cause: Cause) -> None:
        self._group.broken(cause)

    def _ready(self) -> None:
        self._complete.set()
        self._engine.wake()


def _hello(spec: PrefillRankSpec, life: Incarnation, rank: _Rank) -> wire.Hello:
    info, pool = rank.node.info, rank.parts.pool
    return wire.Hello(
        member=life,
        rank=Rank(spec.rank),
        pages=pool.pages.capacity,
        rows=pool.layout.num_rows,
        info=wire.RankLife(
            incarnation=rank.node.incarnation,
            control=info.control,
            backend=info.backend,
            pool=info.pool,
        ),
    )


async def run_rank(spec: PrefillRankSpec) -> None:
    """Run one of the other ranks, until a signal stops it or its group cannot continue."""
    async with AsyncExitStack() as stack:
        key = read_key(spec.key)
        settings = spec.settings
        # Each rank needs its own control port. A port of 0 stays 0, which picks a free one.
        port = settings.control_port and settings.control_port + spec.rank
        rank = await _rank(
            spec, stack, bind_control(msgspec.structs.replace(settings, control_port=port))
        )
        node, (model, pool, executor) = rank.node, rank.parts
        life = _life()
        socket = connect_dealer(spec.steps, life, key)
        stack.callback(socket.close)
        follower = StepFollower(
            PrefillSteps(
                model, pool, pool.pages, executor, samples=_samples(spec), cache=rank.cache
            ),
            socket,
            hello=_hello(spec, life, rank),
            status=lambda: _status(
                rank,
                spec.rank,
                len(follower.requests),
                member,
                follower.failed_steps,
                follower.dropped,
            ),
            neighbours=model.neighbours,
            shards=spec.shards,
            tells_openings=settings.optimistic_prefill > 0,
            prefetch=settings.cache_prefetch_policy,
        )

        def open_room(key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
            opened, prompt = _open_room(node, room, request)
            follower.add(key.ticket, opened, prompt.tokens, prompt.params, prompt.namespace)
            return opened

        member = _member(spec, life, key, rank, open_room, stack)
        stack.push_async_callback(follower.close)
        await follower.start()
        starting = asyncio.create_task(_pass_started(member, follower), name="kvflow-group-start")
        starting.add_done_callback(_end_if_failed)
        stop = StopSignals()
        stop.listen()
        announce(Ready("prefill", f"rank {spec.rank}", os.getpid()))
        unusable = asyncio.create_task(_end_when_unusable(follower), name="kvflow-steps-unusable")
        try:
            await stop.requested.wait()
        finally:
            for task in (starting, unusable):
                task.cancel()
            await asyncio.wait([starting, unusable])
        node.leave()


async def _end_when_unusable(follower: StepFollower) -> None:
    try:
        await follower.unusable
    except KvflowError as error:
        end_at_once("prefill", error)


def _end_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        end_at_once(
            "prefill", LostError(f"{task.get_name()} has ended: {type(error).__name__}: {error}")
        )


async def _pass_started(member: MemberShell, follower: StepFollower) -> None:
    while True:
        follower.started((await member.started()).key.ticket)


async def _rank(spec: PrefillRankSpec, stack: AsyncExitStack, control: Control) -> _Rank:
    settings, rank = _settings_of_rank(spec), spec.rank
    stack.callback(control[0].close)
    part = ModelPart(rank // spec.shards, spec.stages, rank % spec.shards, spec.shards)
    meeting = Meeting(Path(spec.meeting), spec.attempt)
    parts = await stack.enter_async_context(loaded(settings, part, meeting))
    node = await prefill_node(parts, settings, control, stack, rank=rank, world_size=part.ranks)
    cache = await stack.enter_async_context(
        prefix_cache(settings, parts, computes=True, ranks=part.ranks)
    )
    await node.start()
    return _Rank(node, parts, cache, settings)


def _settings_of_rank(spec: PrefillRankSpec) -> Settings:
    """Return the settings with the rank's own storage directory.

    Only the first rank publishes cache events.
    """
    settings = spec.settings
    return msgspec.structs.replace(
        settings,
        l3_dir=settings.l3_dir and os.path.join(settings.l3_dir, f"rank-{spec.rank}"),
        kv_events_config="" if spec.rank else settings.kv_events_config,
    )


def _member(
    spec: PrefillRankSpec,
    life: Incarnation,
    key: ControlKey | None,
    rank: _Rank,
    open_room: OpenRoom,
    stack: AsyncExitStack,
) -> MemberShell:
    socket = connect_dealer(spec.group, life, key)
    stack.callback(socket.close)
    world_size = spec.stages * spec.shards
    shell = MemberShell(
        GroupMember(life, spec.rank, world_size, now=monotonic(), process=own_identity()),
        socket=socket,
        open_room=open_room,
        refuse_room=rank.node.refuse,
        wait_dead=wait_dead,
        counts=rank.node.counts,
        now=monotonic,
        ready=functools.partial(ready, rank.cache, rank.settings.cache_prefetch_policy),
    )
    stack.push_async_callback(shell.stop)
    return shell


def _open_room(
    node: PrefillNode, room: RoomId, request: bytes
) -> tuple[PrefillRoom, wire.GroupPrompt]:
    asked = wire.parse_prompt(request)
    return node.room(room, asked.checked, deadline_s=asked.deadline_s), asked


def _status(
    of: _Rank, rank: int, requests: int, member: MemberShell, failed_steps: int, dropped: int
) -> wire.Status:
    node, pool = of.node, of.parts.pool
    return wire.Status(
        rank=Rank(rank),
        pid=os.getpid(),
        pages_free=pool.pages.free_pages,
        pages_total=pool.pages.num_pages,
        pages_at_rest=pool.places.at_rest() and node.staging_at_rest,
        pinned_pages=node.pinned_pages,
        rooms=node.rooms_by_phase(),
        requests=requests,
        tickets=len(member.member.tickets),
        bytes_moved=node.counts.bytes_moved,
        failed_steps=failed_steps,
        handler_errors=node.counts.handler_errors,
        dropped=dropped + sum(node.counts.dropped.values()),
        cache=None if of.cache is None else of.cache.stats(),
    )


def _samples(spec: PrefillRankSpec) -> bool:
    # The first shard of the last stage samples.
    return spec.rank == (spec.stages - 1) * spec.shards


def _life() -> Incarnation:
    return Incarnation(secrets.randbits(63) | 1)
