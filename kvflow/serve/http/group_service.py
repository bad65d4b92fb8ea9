"""The completion services of workers with several ranks: a prefill group and a sharded decode."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from kvflow.handlers.rooms import PrefillRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.arguments import check_prompt
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion_service import GenerationRequest, ModelCard, RankReport, Report
from kvflow.serve.http.engine_services import DecodeService, PrefillService, whole_answer

if TYPE_CHECKING:  # the engines import torch, which is slow
    from kvflow.handlers.group import GroupRequest
    from kvflow.serve.engine.ranks.group import PrefillGroup
    from kvflow.serve.engine.ranks.shard_leading import ShardLeader
    from kvflow.serve.engine.ranks.wire import Status
    from kvflow.serve.engine.scheduler.decode import DecodeEngine
    from kvflow.serve.engine.scheduler.prefill import PrefillEngine


class GroupPrefillService(PrefillService):
    """A `PrefillService` over several ranks. Each request runs and ends on all of them together."""

    def __init__(
        self,
        card: ModelCard,
        node: PrefillNode,
        engine: PrefillEngine,
        timeout_s: float,
        *,
        group: PrefillGroup,
        own_status: Callable[[], Status],
        others: Mapping[int, Status],
        world: tuple[int, int],
    ) -> None:
        """Make the service of the first rank. `world` is (stages, shards).

        `others` has the last status of each other rank, and changes while the service runs.
        """
        super().__init__(card, node, engine, timeout_s)
        self._group, self._own_status, self._others = group, own_status, others
        self._world = world

    @property
    def unavailable_reason(self) -> str:
        return super().unavailable_reason or self._group.unavailable_reason

    @property
    def limits(self) -> EngineLimits:
        return self._group.limits

    def opened(self, room: PrefillRoom) -> None:
        self._recent_rooms.add(room)

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        assert request.room is not None
        was_opened = False

        def on_open(opened: GroupRequest) -> None:
            nonlocal was_opened
            was_opened = True
            self._open[id(request)] = opened

        try:
            checked = request.checked or check_prompt(request.prompt)
            first = await self._group.prefill(
                request.room,
                request.prompt,
                checked,
                request.params,
                self._timeout_s,
                on_open,
                namespace=request.namespace,
            )
        except KvflowError as error:
            # A room that was opened counts its failure itself.
            if not was_opened:
                self._node.counts.room_refused(error.cause())
            raise
        finally:
            self._open.pop(id(request), None)
        yield whole_answer(first)

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        self._group.refuse(room, cause)

    async def flush_cache(self) -> None:
        # Flushing only this rank's cache would not empty the caches of the other ranks.
        self._engine.flush()

    def end_requests(self) -> None:
        # This ends the rooms of requests on every rank. `super` ends the other rooms of this rank.
        for opened in list(self._open.values()):
            opened.close(Cause(Code.SHUTDOWN, "the prefill is shutting down"))
        super().end_requests()

    def report(self) -> Report:
        stages, shards = self._world
        statuses = {**self._others, 0: self._own_status()}
        ranks = tuple(_rank_report(rank, statuses.get(rank)) for rank in range(stages * shards))
        return msgspec.structs.replace(
            super().report(), pp_size=stages, tp_size=shards, ranks=ranks
        )


def _rank_report(rank: int, status: Status | None) -> RankReport:
    if status is None:
        return RankReport(rank=rank, up=False)
    figures = msgspec.structs.asdict(status) | {
        "rank": rank,
        "up": True,
        "internal_errors": {"handler": status.handler_errors, "step": status.failed_steps},
        "messages_dropped": status.dropped,
    }
    return RankReport(**{name: figures[name] for name in RankReport.__struct_fields__})


class ShardedDecodeService(DecodeService):
    """A `DecodeService` over several shards. All of them run the first shard's steps."""

    def __init__(
        self,
        card: ModelCard,
        node: DecodeNode,
        engine: DecodeEngine,
        timeout_s: float,
        *,
        shards: ShardLeader,
    ) -> None:
        super().__init__(card, node, engine, timeout_s)
        self._shards = shards

    def break_off(self, cause: Cause) -> None:
        """End every request on both legs: without the lost shard no step can run."""
        self._engine.break_off(cause)
        self._recent_rooms.close(cause)
        self._node.leave()

    def report(self) -> Report:
        whole, shards = super().report(), self._shards
        mine = RankReport(
            rank=0,
            up=True,
            pid=os.getpid(),
            pages_free=whole.pages_free,
            pages_total=whole.pages_total,
            pages_at_rest=whole.pages_at_rest,
            rooms=whole.rooms_by_state,
            requests=whole.running,
            bytes_moved=whole.bytes_moved,
            internal_errors=whole.internal_errors,
        )
        # The other shards use the page numbers of the first, so its figures hold for them too.
        others = tuple(
            RankReport(rank=shard.number, up=False)
            if not shard.is_up
            else RankReport(
                rank=shard.number,
                up=True,
                pid=shard.pid,
                pages_free=whole.pages_free,
                pages_total=whole.pages_total,
                pages_at_rest=whole.pages_at_rest,
                requests=shards.sequences,
            )
            for shard in shards.shards
        )
        return msgspec.structs.replace(whole, tp_size=1 + len(others), ranks=(mine, *others))
