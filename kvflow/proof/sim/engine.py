"""A minimal engine over rooms. Implement `Scheduler` to simulate another engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvflow.aio import in_thread
from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.rules.transfers import handoff_of
from kvflow.proof.sim.chunks import in_chunks, positions, way_of
from kvflow.proof.sim.pages import books_of
from kvflow.proof.sim.residence import Residence
from kvflow.proof.sim.stay import Stay
from kvflow.protocols.arguments import prompt_digest
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.wire.ranks import DpRankError, RankInfo


class Named(NamedTuple):
    """The prefill that a request names, and its data-parallel group if the request names one."""

    prefill: str | Sequence[RankInfo]
    dp_rank: int | None = None


class Job:
    """One request as one node receives it.

    Both legs of a request have the same `room`, and normally the same `prompt`.
    """

    def __init__(
        self,
        room: int,
        prompt: list[int],
        chunks: Sequence[int] = (1,),
        *,
        deadline_s: float | None = None,
        ranks: Callable[[], Sequence[RankInfo]] = tuple,
        names: Callable[[], Named] | None = None,
        fails_at: int | None = None,
        refused: bool = False,
        kept_s: float = 0.0,
        offers_after_s: float | None = None,
        topples: Callable[[], None] | None = None,
        stay: Stay | None = None,
        issue: Callable[[int, Cause], Cause] = lambda _, cause: cause,
    ) -> None:
        self.room, self.prompt, self.chunks, self.deadline_s = room, prompt, chunks, deadline_s
        # Ranks of the request's prefill group, as a registry would list them now.
        self.ranks = ranks
        self._names = names
        # The engine breaks down before chunk number `fails_at`, or refuses the whole request.
        self.fails_at, self.refused = fails_at, refused
        self.kept_s = kept_s  # time for which decode generates
        # Delay from decode's announcement of the room to its offer of pages. If None, decode
        # announces nothing.
        self.offers_after_s = offers_after_s
        self.topples = topples  # called when the room ends
        self.stay = stay  # what the request does at decode after its room lands
        self.residence: Residence | None = None  # plays `stay`
        self.close: Callable[[Cause], None] | None = None  # ends the room, once it is open
        self.succeeded = False
        self._issue = issue

    def cause(self, code: Code, text: str) -> Cause:
        """Return a cause that names its room, so that the rules can verify who receives it."""
        return self._issue(self.room, Cause(code, f"{text} #{self.room}"))

    @property
    def handoff(self) -> bytes:
        """Handoff that prefill must send with its last chunk."""
        return handoff_of(prompt_digest(self.prompt))

    def named(self) -> Named:
        """Return the prefill as the client names it now: by default, by its current ranks."""
        return Named(self.ranks()) if self._names is None else self._names()

    def placed_chunks(self, layout: PoolLayout) -> Sequence[Sequence[int]]:
        """Return the positions of each chunk among the prompt's places of all spaces."""
        wanted = layout.wanted(len(self.prompt))
        return positions(wanted, wanted, in_chunks(layout, self.chunks, wanted, way_of(self.room)))

    def model_step(
        self, node: PrefillNode, pages: PageIndices, which: Sequence[int]
    ) -> Callable[[], None]:
        """Return a function that computes `pages`, which have these positions among the prompt's.

        Call it in a thread. The pages belong to the step until it returns (I13).
        """
        digest, books = prompt_digest(self.prompt), books_of(node.pages)
        for page in pages.tolist():
            books.readers[page] += 1

        def compute() -> None:
            for index, page in zip(which, pages.tolist(), strict=True):
                books.bytes.fill(page, digest, index)
                books.readers[page] -= 1

        return compute


class Scheduler(Protocol):
    """Interface of an engine's scheduler. The simulator calls it once per job, in a task of the
    node. The call may raise KvflowError.
    """

    async def prefill(self, node: PrefillNode, job: Job) -> None: ...

    async def decode(self, node: DecodeNode, job: Job) -> None: ...


class PlainScheduler:
    """Scheduler that starts every job immediately."""

    async def prefill(self, node: PrefillNode, job: Job) -> None:
        if job.refused:
            return node.refuse(job.room, job.cause(Code.CAPACITY, "the engine will not have it"))
        owner, layout = object(), node.pool.layout
        async with node.room(job.room, job.prompt, deadline_s=job.deadline_s) as room:
            job.close = room.close
            try:
                pages = node.pages.take_room(layout.wanted(len(job.prompt)), owner)
            except KvflowError as error:
                room.close(error.cause())
                raise
            try:
                await room.matched()
                chunks = job.placed_chunks(layout)
                for number, which in enumerate(chunks):
                    if number == job.fails_at:
                        return room.close(job.cause(Code.ENGINE_ERROR, "the engine broke down"))
                    last, chunk = number == len(chunks) - 1, pages[which]
                    await in_thread(job.model_step(node, chunk, which))
                    room.send(chunk, last=last, handoff=job.handoff if last else b"")
                await room.done()
                job.succeeded = True
            finally:
                node.pages.give_back(pages, owner)
        return None

    async def decode(self, node: DecodeNode, job: Job) -> None:
        if job.refused:
            return refuse(node, job, job.cause(Code.CAPACITY, "decode will not have it"))
        try:
            await self._decode(node, job)
        # The other leg may wait at any group of the prefill, so notify all groups of the refusal.
        except DpRankError as error:
            refuse(node, job, error.cause())
            raise
        return None

    async def _decode(self, node: DecodeNode, job: Job) -> None:
        async with await opened(node, job) as room:
            handoff = await room.landed()
            if (residence := job.residence) is not None:
                job.close = lambda _: residence.abort()
                job.succeeded = await residence.play(room, handoff)
                return
            job.succeeded = True
            owner = object()
            pages = room.keep(owner)
            try:
                await asyncio.sleep(job.kept_s)
            finally:
                node.pages.give_back(pages, owner)


def refuse(node: DecodeNode, job: Job, cause: Cause) -> None:
    """Report that decode's half of the request will never come."""
    named = job.named()
    node.refuse(job.room, named.prefill, cause, dp_rank=named.dp_rank)


async def opened(node: DecodeNode, job: Job, prefix_tokens: int = 0) -> DecodeRoom:
    """Open decode's half of the room, and offer its pages, after a delay if the job has one."""
    open_room, named = node.room if job.offers_after_s is None else node.announce, job.named()
    room = open_room(
        job.room,
        named.prefill,
        job.prompt,
        deadline_s=job.deadline_s,
        prefix_tokens=prefix_tokens,
        dp_rank=named.dp_rank,
    )
    job.close = room.close
    if job.topples is not None:
        room.on_end(job.topples)
    if job.offers_after_s is not None:
        try:
            await asyncio.sleep(job.offers_after_s)
        except asyncio.CancelledError:
            room.close()
            raise
        room.offer()
    return room
