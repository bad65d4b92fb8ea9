"""A decode over several shards. The first shard has all parts of a decode, and each other shard
only runs the steps.

All shards are processes on one machine and map the same pool. Each step that the first shard sends
names pages of this pool. Only the first shard decides who owns a page, what is transferred, and
which request is retracted.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from kvflow.aio import in_thread
from kvflow.protocols.errors import KvflowError, LostError
from kvflow.serve.config.settings import Settings
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from kvflow.serve.engine.ranks.shard_following import ShardFollower
from kvflow.serve.engine.ranks.shard_leading import ShardLeader
from kvflow.serve.engine.ranks.shard_wire import ShardLink
from kvflow.serve.http.group_service import ShardedDecodeService
from kvflow.serve.launch.meeting import meeting_directory
from kvflow.serve.launch.parts import Parts, loaded, loaded_model
from kvflow.serve.launch.process import Ready, StopSignals, announce
from kvflow.serve.launch.ranks import DecodeRankSpec, RankProcesses, end_at_once
from kvflow.serve.launch.services import sharded_decode_over
from kvflow.transports.host.identity import own_identity


class ShardedDecode(NamedTuple):
    """A running decode over several shards.

    `lost` completes with an error if another shard is lost, because no step can run then. All
    requests end with that error, and the process must end.
    """

    service: ShardedDecodeService
    parts: Parts
    lost: asyncio.Future[KvflowError]


@asynccontextmanager
async def decode_over_shards(settings: Settings) -> AsyncGenerator[ShardedDecode, None]:
    """Run a decode over shards, and yield it when all are ready. Raises: MisuseError, LostError."""
    async with AsyncExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(1, settings.tp)]
        theirs = {shard: pair[1] for shard, pair in enumerate(pairs, 1)}
        for _, end in pairs:
            stack.callback(end.close)
        spec = DecodeRankSpec(
            rank=0,
            stages=1,
            shards=settings.tp,
            attempt=0,
            meeting=stack.enter_context(meeting_directory()),
            settings=settings,
            links={shard: end.fileno() for shard, end in theirs.items()},
        )
        first = _FirstShard(spec.meeting)
        processes = RankProcesses(
            spec,
            "decode-rank",
            own=spec.links,
            on_lost=first.process_ended,
            on_fatal=first.cannot_go_on,
        )
        stack.push_async_callback(processes.close)
        processes.start()
        parts = await stack.enter_async_context(
            loaded(settings, _part(spec), Meeting(Path(spec.meeting)), for_stage=True)
        )
        neighbours = parts.model.neighbours
        leader = first.leader = ShardLeader(
            [ShardLink(end) for end, _ in pairs], neighbours, first.on_lost
        )
        leader.start()
        stack.push_async_callback(in_thread, leader.close)
        await parts.executor.run(functools.partial(leader.share, parts.pool))
        for end in theirs.values():
            # Once these copies are closed, the connection to a shard closes when that shard ends.
            end.close()
        neighbours.lead(leader)
        service = await stack.enter_async_context(sharded_decode_over(parts, settings, leader))
        first.serves(service)
        stack.callback(first.stop)
        yield ShardedDecode(service, parts, first.lost)


async def run_shard(spec: DecodeRankSpec) -> None:
    """Run one of the other shards until a signal, or until the first shard ends.

    Raises: KvflowError.
    """
    async with AsyncExitStack() as stack:
        link = ShardLink(socket.socket(fileno=spec.links[spec.rank]))
        stack.callback(link.close)
        model, executor = await stack.enter_async_context(
            loaded_model(spec.settings, _part(spec), Meeting(Path(spec.meeting)))
        )
        follower = ShardFollower(model, link, executor, own_identity())
        stop = StopSignals()
        stop.listen()
        running = asyncio.create_task(follower.run(), name="kvflow-shard")
        announce(Ready("decode", f"shard {spec.rank}", os.getpid()))
        stopping = asyncio.create_task(stop.requested.wait())
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        follower.stop()
        await running


def _part(spec: DecodeRankSpec) -> ModelPart:
    return ModelPart(shard=spec.rank, shards=spec.shards)


class _FirstShard:
    """The first shard's reaction to the loss of another shard."""

    def __init__(self, meeting: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._meeting = meeting
        self._service: ShardedDecodeService | None = None
        self._stopping = False
        self.leader: ShardLeader | None = None
        self.lost: asyncio.Future[KvflowError] = self._loop.create_future()

    def serves(self, service: ShardedDecodeService) -> None:
        self._service = service
        if self.lost.done():
            service.break_off(self.lost.result().cause())

    def stop(self) -> None:
        """From now on, ignore the end of another shard's process."""
        self._stopping = True

    def process_ended(self, shard: int, why: str) -> None:
        if self.leader is not None and not self._stopping:
            self.leader.lost(shard, why)

    def cannot_go_on(self, error: KvflowError) -> None:
        """End this process if another shard's process ends before there is a service.

        Loading the model may wait for that shard forever. Later, `on_lost` handles this.
        """
        if self._service is None and not self._stopping:
            shutil.rmtree(self._meeting, ignore_errors=True)
            end_at_once("decode", error)

    def on_lost(self, error: LostError) -> None:
        self._loop.call_soon_threadsafe(self._break_off, error)

    def _break_off(self, error: LostError) -> None:
        if self._service is not None:
            self._service.break_off(error.cause())
        self.lost.set_result(error)
