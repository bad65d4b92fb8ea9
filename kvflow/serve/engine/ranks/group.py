"""Requests that several prefill ranks serve together, as the first rank sees them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvflow.aio import all_ended
from kvflow.handlers.group import GroupRequest, LeaderShell, MemberShell, RankRequest
from kvflow.handlers.rooms import PrefillRoom
from kvflow.protocols.arguments import CheckedPrompt
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import Cause, Code, KvflowError, room_error
from kvflow.serve.engine.model.sequence import Prompt
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest
from kvflow.telemetry.spans import MARKS, Marks

log = logging.getLogger("kvflow.serve.engine")


@dataclass(slots=True, eq=False, repr=False)
class _Asked:
    """One request of a client.

    `computing` is set once the request is open at this rank, and `started` once the group starts
    it. `unopened` has the ranks that have not yet reported the request as open. `matched` is the
    room of a started request until the engine gets it.
    """

    group: GroupRequest
    prompt: Prompt
    params: SamplingParams
    namespace: Namespace
    unopened: set[int]
    computing: PrefillRequest | None = None
    started: bool = False
    matched: PrefillRoom | None = None
    token: asyncio.Future[TokenOut] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    marks: Marks | None = field(default_factory=MARKS.get)


class PrefillGroup:
    """Opens requests at every rank; notifies the engine when they are open, and when they start."""

    def __init__(
        self, leader: LeaderShell, member: MemberShell, engine: PrefillEngine, steps: StepLeader
    ) -> None:
        self._leader, self._member, self._engine, self._steps = leader, member, engine, steps
        self._asked: dict[int, _Asked] = {}  # by ticket
        self._serving: set[asyncio.Task[TokenOut]] = set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._start_requests(), name="kvflow-group-start")

    async def close(self) -> None:
        for asked in self._asked.values():
            asked.group.close(Cause(Code.SHUTDOWN, "the prefill is shutting down"))
        try:
            await all_ended(self._serving)
        finally:
            if self._task is not None:
                self._task.cancel()
                await all_ended([self._task])

    @property
    def unavailable_reason(self) -> str:
        """The reason why no request can be served now. Empty while requests can be served."""
        return self._leader.leader.unavailable_reason or self._steps.unavailable_reason

    @property
    def limits(self) -> EngineLimits:
        """The limits of one request, whose prompt must fit into the smallest pool of all ranks."""
        return self._engine.limits.within(self._steps.most_places[0])

    @property
    def running(self) -> int:
        return len(self._asked)

    async def prefill(
        self,
        room: int,
        prompt: Prompt,
        checked: CheckedPrompt,
        params: SamplingParams,
        deadline_s: float,
        on_open: Callable[[GroupRequest], None] = lambda request: None,
        *,
        namespace: Namespace = ANY,
    ) -> TokenOut:
        """Compute `prompt` on all ranks, and send its pages.

        Returns the first token once all pages landed everywhere. If the ranks have caches, the
        tokens that all of them have cached under `namespace` are not computed again. A cancellation
        ends the request on all ranks, unless the first token is already known.

        Raises: MisuseError, CapacityError, RoomInUseError, AbortedError while shutting down, or
        LostError while a rank is missing. Every rank then refuses decode's half. If the group ends
        the request after it was opened, this raises the request's error.
        """
        try:
            self._check(prompt, params)
        except KvflowError as error:
            self.refuse(room, error.cause())
            raise
        ids = np.ascontiguousarray(prompt, dtype="<u4").tobytes()
        request = wire.GroupPrompt(
            ids=ids,
            digest=checked.digest,
            params=params,
            deadline_s=deadline_s,
            namespace=namespace,
        )
        opened = self._leader.open(room, wire.encode(request))
        asked = self._asked[opened.ticket] = _Asked(
            opened, prompt, params, namespace, set(range(self._leader.leader.world_size))
        )
        on_open(opened)
        serving = asyncio.create_task(self._serve(asked), name=f"kvflow-group-{opened.ticket}")
        self._serving.add(serving)
        serving.add_done_callback(self._forget)
        try:
            # Shielded, so that after a cancellation, the task still awaits the group's decision.
            return await asyncio.shield(serving)
        except asyncio.CancelledError:
            # Once the token is known, only writes are left, and they end soon.
            # Decode may already have its answer, so the request continues.
            if not asked.token.done():
                opened.close(Cause(Code.CLIENT_GONE, "the request was cancelled"))
            raise

    def refuse(self, room: int, cause: Cause) -> None:
        """Refuse decode's half of a room at every rank, because no request for it will come.

        Raises: MisuseError if `room` is not a valid room id.
        """
        self._leader.refuse(room, cause)

    def _check(self, prompt: Prompt, params: SamplingParams) -> None:
        self._engine.check(prompt, params)
        self.limits.check_prompt(prompt)

    async def _serve(self, asked: _Asked) -> TokenOut:
        """Wait for the group's decision, then free all that this rank holds for the request."""
        ticket, succeeded = asked.group.ticket, False
        try:
            await asked.group.decided()
            succeeded = True
            return await asked.token
        finally:
            asked.group.close()
            del self._asked[ticket]
            if asked.computing is not None:
                if succeeded:
                    self._engine.steps.keep(asked.computing)
                self._engine.drop(asked.computing)
            asked.token.cancel()
            self._steps.drop(ticket, succeeded=succeeded)

    def _forget(self, serving: asyncio.Task[TokenOut]) -> None:
        self._serving.discard(serving)
        if not serving.cancelled():
            # Retrieve the error, because asyncio logs errors that nobody retrieves.
            serving.exception()

    def opened(self, ticket: int, room: PrefillRoom) -> None:
        """Pass a request to the engine when prefill's half of the room is open at this rank."""
        asked = self._asked.get(ticket)
        # The group decided on the request before this rank opened it.
        if asked is None:
            return
        try:
            asked.computing = self._engine.expect(
                room, asked.prompt, asked.params, ticket, asked.namespace
            )
        except KvflowError as error:
            room.close(error.cause())
            return
        # The rank opens rooms in a task of its own, whose context is not the request's.
        if (marks := asked.marks) is not None:
            asked.computing.marks = marks
            marks.opened(room)

        def known(first: asyncio.Future[TokenOut | None]) -> None:
            if first.cancelled():
                return
            error = first.exception()
            if error is None:
                if (token := first.result()) is not None:
                    self.first_token(ticket, token)
            else:
                if isinstance(error, KvflowError):
                    cause = error.cause()
                else:
                    cause = Cause(Code.ENGINE_ERROR, str(error))
                room.close(cause)

        asked.computing.first.add_done_callback(known)
        self.opened_at(0, ticket)

    def opened_at(self, rank: int, ticket: int) -> None:
        """Record that a request is open at `rank`.

        Once it is open at every rank, a step may name it.
        """
        asked = self._asked.get(ticket)
        if asked is None:
            return
        asked.unopened.discard(rank)
        if not asked.unopened and asked.computing is not None:
            self._engine.may_begin(asked.computing)
            if (room := asked.matched) is not None:
                try:
                    self._begin(asked, asked.computing, room)
                except KvflowError as error:
                    room.close(error.cause())

    def _begin(self, asked: _Asked, computing: PrefillRequest, room: PrefillRoom) -> None:
        """Let the engine compute a started request, or keep it until every rank can name it.

        A rank that compiles the request's grammar reports it as open afterwards. A step that named
        it before would wait there, and all later steps with it.
        """
        if asked.params.grammar is not None and asked.unopened:
            asked.matched = room
            return
        asked.matched = None
        self._engine.matched(computing, room.prefix_tokens)

    def first_token(self, ticket: int, token: TokenOut) -> None:
        asked = self._asked.get(ticket)
        if asked is None or asked.computing is None:
            return
        if not asked.started:
            asked.computing.early_token = token
        elif not asked.token.done():
            asked.token.set_result(token)

    def agreed(self, ticket: int, tokens: int) -> None:
        asked = self._asked.get(ticket)
        if asked is not None and asked.computing is not None:
            self._engine.agreed(asked.computing, tokens)

    def broken(self, cause: Cause) -> None:
        """End all requests that may have taken part in the generation that just ended."""
        for asked in list(self._asked.values()):
            computing = asked.computing
            if computing is not None and (asked.started or self._engine.has_places(computing)):
                asked.group.close(cause)
                self._engine.drop(computing)
                # The other ranks must free the request's places before a later step needs them.
                self._steps.drop(asked.group.ticket)
                if not asked.token.done():
                    asked.token.set_exception(room_error(cause))
                    # There may be no reader, and asyncio logs errors that nobody retrieves.
                    asked.token.exception()

    async def _start_requests(self) -> None:
        while True:
            started = await self._member.started()
            try:
                self._start(started)
            except KvflowError as error:
                started.room.close(error.cause())
            # The error belongs to one request, and must not stop those that follow.
            except Exception as error:
                log.exception("request %d of the group could not start", started.key.ticket)
                text = f"starting the request failed: {type(error).__name__}"
                started.room.close(Cause(Code.ENGINE_ERROR, text))

    def _start(self, started: RankRequest) -> None:
        ticket = started.key.ticket
        asked = self._asked.get(ticket)
        if asked is None or asked.computing is None or started.room.ended:
            return
        # The group has already decided on the request, so no step may name it.
        if ticket not in self._leader.leader.requests:
            return
        asked.started = True
        self._steps.keep(ticket)
        if asked.computing.early_token is not None:
            asked.token.set_result(asked.computing.early_token)
        self._begin(asked, asked.computing, started.room)
