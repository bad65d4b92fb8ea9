"""Completion services of both roles: an engine and a node behind the interface that HTTP uses."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.http.errors import RequestError
from kvflow.memory.allocator import PageAllocator
from kvflow.node import DecodeNode, PrefillNode
from kvflow.node.report import node_report
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.wire.ranks import DpRankError, RankInfo
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.completion_service import GenerationRequest, ModelCard, Report
from kvflow.telemetry.spans import MARKS

if TYPE_CHECKING:  # the engines import torch, which is slow
    from kvflow.handlers.group import GroupRequest
    from kvflow.serve.cache.prefix import Prefix
    from kvflow.serve.engine.scheduler.budget import Admission
    from kvflow.serve.engine.scheduler.decode import DecodeEngine
    from kvflow.serve.engine.scheduler.prefill import PrefillEngine

REMEMBERED_ROOMS = 256
_KIND_LABELS = {"grant": "room", "quarantined": "quarantine"}
N = TypeVar("N", PrefillNode, DecodeNode)
E = TypeVar("E", bound="PrefillEngine | DecodeEngine")


class RecentRooms:
    """The latest `REMEMBERED_ROOMS` rooms, for GET /rooms and GET /rooms/{room}."""

    def __init__(self) -> None:
        self._rooms: OrderedDict[int, PrefillRoom | DecodeRoom] = OrderedDict()

    def add(self, room: PrefillRoom | DecodeRoom) -> None:
        self._rooms[room.room] = room
        self._rooms.move_to_end(room.room)
        if (marks := MARKS.get()) is not None:
            marks.opened(room)
        if len(self._rooms) > REMEMBERED_ROOMS:
            self._rooms.popitem(last=False)

    def close(self, cause: Cause) -> None:
        for room in list(self._rooms.values()):
            room.close(cause)

    def summaries(self, most_ended: int) -> list[dict[str, Any]]:
        """Return one entry for each open room and the latest ended ones, the latest first."""
        found = []
        for room in reversed(self._rooms.values()):
            if room.ended and (most_ended := most_ended - 1) < 0:
                continue
            found.append(_summary(room))
        return found

    def story(self, room_id: int) -> dict[str, Any] | None:
        room = self._rooms.get(room_id)
        if room is None:
            return None
        events = [
            {
                "at_s": round(line.at_s - room.opened_at_s, 6),
                "what": line.what,
                "phase": line.phase.lower(),
                "text": line.text,
            }
            for line in room.story()
        ]
        # With the time of day, a client can merge the stories of both halves.
        opened_unix_s = time.time() - (time.monotonic() - room.opened_at_s)
        return {**_summary(room), "opened_unix_s": round(opened_unix_s, 6), "events": events}


def _summary(room: PrefillRoom | DecodeRoom) -> dict[str, Any]:
    cause = room.cause
    summary = {
        "room": room.room,
        "request_id": room.request_id,
        "opened_ago_s": round(time.monotonic() - room.opened_at_s, 3),
        "phase": room.phase.name.lower(),
        "ended": room.ended,
        "cause": None if cause is None else str(cause),
    }
    if isinstance(room, PrefillRoom):
        summary.update(bytes_landed=room.bytes_landed, bytes_total=room.bytes_total)
    return summary


def owned_by_kind(pages: PageAllocator) -> dict[str, int]:
    """Return the number of pages (or rows) that are not free, by kind of owner."""
    kinds: dict[str, int] = {}
    for owner, count in pages.owned().items():
        kind = owner[0] if isinstance(owner, tuple) else type(owner).__name__.lower()
        label = _KIND_LABELS.get(str(kind), str(kind))
        kinds[label] = kinds.get(label, 0) + count
    return kinds


class EngineService(Generic[N, E]):
    """The base of both services, over one node and one engine."""

    def __init__(self, card: ModelCard, node: N, engine: E, timeout_s: float) -> None:
        self.card = card
        self._node: N = node
        self._engine: E = engine
        self._timeout_s = timeout_s
        self._recent_rooms = RecentRooms()

    @property
    def role(self) -> str:
        return self._node.role

    @property
    def unavailable_reason(self) -> str:
        return self._node.unavailable_reason if self._engine.healthy else "the engine has stopped"

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    def end_requests(self) -> None:
        self._engine.end_requests()
        self._node.leave()

    def report(self) -> Report:
        node, load, cache = self._node, self._engine.load(), self._engine.cache
        pages, rows = node.pool.pages, node.pool.rows if node.pool.layout.num_rows else None
        own = node_report(
            node,
            pages_free=pages.free_pages,
            pages_by_kind=owned_by_kind(pages),
            at_rest=node.pool.places.at_rest() and node.staging_at_rest,
        )
        counted = {
            "internal_errors": own.internal_errors | {"step": self._engine.failed_steps},
            "rows_free": rows.free_pages if rows else 0,
            "rows_total": rows.num_pages if rows else 0,
            "rows_by_kind": owned_by_kind(rows) if rows else {},
        }
        return Report(
            **(msgspec.structs.asdict(own) | counted),
            queue_seconds=self._engine.queue_seconds,
            running=load.running,
            waiting=load.waiting,
            cache=None if cache is None else cache.stats(),
            kv_events=None
            if cache is None or cache.publisher is None
            else cache.publisher.describe(),
        )

    def rooms(self, most_ended: int = REMEMBERED_ROOMS) -> Sequence[dict[str, Any]]:
        return self._recent_rooms.summaries(most_ended)

    def story(self, room: int) -> dict[str, Any] | None:
        return self._recent_rooms.story(room)

    def peers(self) -> Sequence[dict[str, Any]]:
        return self._node.peers()

    def declare_dead(self, incarnation: int, why: str) -> None:
        # A prefill may have been a decode before, and its pool may have pages that it lent then.
        self._node.declare_dead(incarnation, why)

    def abort(self, request: GenerationRequest) -> None:
        """Do nothing. After decode aborts, no router reads prefill's answer."""

    async def flush_cache(self) -> None:
        if (cache := self._engine.cache) is not None:
            cache.flush()


class PrefillService(EngineService[PrefillNode, "PrefillEngine"]):
    """A service that computes each prompt, moves its KV to decode, and yields the first token."""

    def __init__(
        self, card: ModelCard, node: PrefillNode, engine: PrefillEngine, timeout_s: float
    ) -> None:
        super().__init__(card, node, engine, timeout_s)
        # The keys are `id(request)`, since a later request may have the same room number.
        self._open: dict[int, PrefillRoom | GroupRequest] = {}

    @property
    def rank(self) -> RankInfo:
        """This rank's entry in the bootstrap registry."""
        return self._node.info

    def report(self) -> Report:
        return msgspec.structs.replace(super().report(), optimism=self._engine.optimism)

    async def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        assert request.room is not None
        try:
            room = self._node.room(
                request.room, request.checked or request.prompt, deadline_s=self._timeout_s
            )
        except KvflowError as error:
            self._node.counts.room_refused(error.cause())
            raise
        self._recent_rooms.add(room)
        self._open[id(request)] = room
        try:
            first = await self._engine.prefill(
                room, request.prompt, request.params, namespace=request.namespace
            )
        finally:
            del self._open[id(request)]
        yield whole_answer(first)

    def abort(self, request: GenerationRequest) -> None:
        if opened := self._open.get(id(request)):
            opened.close(Cause(Code.ABORTED, "ended by /abort_request at prefill"))

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        self._node.refuse(room, cause)


def whole_answer(first: TokenOut) -> TokenOut:
    """Mark the first token as the last, which routers expect of a prefill's answer."""
    if first.finish_reason is not None:
        return first
    return msgspec.structs.replace(first, finish_reason="length")


class DecodeService(EngineService[DecodeNode, "DecodeEngine"]):
    """A service that lends pages to prefill, and yields all tokens once the KV lands."""

    def report(self) -> Report:
        return msgspec.structs.replace(
            super().report(),
            retraction=self._engine.retraction,
            decode_steps=self._engine.steps,
            local_prompts=self._engine.local.report(),
        )

    def tokens(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        if request.room is None:
            return self._computed(request)
        return self._tokens_of_room(request, request.room)

    async def _computed(self, request: GenerationRequest) -> AsyncGenerator[TokenOut, None]:
        tokens = self._engine.compute(request.prompt, request.params, request.namespace)
        async with aclosing(tokens):
            try:
                async for token in tokens:
                    yield token
            except KvflowError as error:
                self._node.counts.engine_failed(error.code)
                raise

    async def _tokens_of_room(
        self, request: GenerationRequest, room_id: int
    ) -> AsyncGenerator[TokenOut, None]:
        if not request.prefill:
            error = RequestError(
                "bootstrap_host is missing: decode cannot find its prefill without it"
            )
            self._node.counts.room_refused(error.cause())
            raise error
        # The room is announced before it waits for admission. Prefill then waits as long as this
        # decode lives, or receives the cause if the room fails.
        prompt = request.checked or request.prompt
        try:
            room = self._node.announce(
                room_id,
                request.prefill,
                prompt,
                deadline_s=self._timeout_s,
                dp_rank=request.prefill_dp_rank,
            )
        except DpRankError as error:
            self._node.counts.room_refused(error.cause())
            raise self._refused_group(request, error) from None
        self._recent_rooms.add(room)
        admission: Admission | None = None
        prefix: Prefix | None = None
        try:
            admission = await self._admit(request, room)
            prefix = await self._engine.cached(request.prompt, request.namespace, admission)
            await room.offer(prefix_tokens=None if prefix is None else prefix.tokens)
        except BaseException as error:
            room.close(error.cause() if isinstance(error, KvflowError) else None)
            if prefix is not None:
                prefix.release()
            if admission is not None:
                admission.release()
            # `offer` raises this if the groups became known only when the registry answered.
            if isinstance(error, DpRankError):
                raise self._refused_group(request, error) from None
            raise
        tokens = self._engine.generate(room, request.prompt, request.params, admission, prefix)
        try:
            async for token in tokens:
                yield token
        except KvflowError as error:
            # A room counts its own failures until it succeeds. Later ones are counted here.
            if room.phase is DecodePhase.SUCCESS:
                self._node.counts.engine_failed(error.code)
            raise
        finally:
            await tokens.aclose()

    def _refused_group(self, request: GenerationRequest, error: DpRankError) -> RequestError:
        """Refuse the room at prefill, whose leg may wait in any group. Return this leg's error."""
        refused = RequestError(f"disagg_prefill_{error}", param="disagg_prefill_dp_rank")
        assert request.room is not None
        self.refuse(request.room, request.prefill, refused.cause(), request.prefill_dp_rank)
        return refused

    async def _admit(self, request: GenerationRequest, room: DecodeRoom) -> Admission:
        waiting = asyncio.ensure_future(
            self._engine.admit(request.prompt, request.params, request.namespace)
        )

        def stop_waiting() -> None:
            waiting.cancel()

        room.on_end(stop_waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            # An admission granted just before the cancellation would keep its place forever.
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().release()
            # If the room ended, `stop_waiting` cancelled the wait, and `opened` raises the cause.
            if room.ended:
                await room.opened()
            raise

    def refuse(self, room: int, prefill: str, cause: Cause, dp_rank: int | None = None) -> None:
        if prefill:
            self._node.refuse(room, prefill, cause, dp_rank=dp_rank)
