"""The first rank's side of shared steps: generations, plans, and the other ranks' reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from kvflow.protocols.errors import Cause, Code, KvflowError, LostError, WireError
from kvflow.protocols.ports import ControlSocket
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import Rank
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.hits import HitVotes
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest

log = logging.getLogger("kvflow.serve.engine")


class Neighbours(Protocol):
    """This rank's connections to other stages and shards, for which its steps may wait."""

    def begin(self, generation: int) -> None:
        """Begin the steps of `generation`, which is larger than every earlier one."""

    @property
    def broken(self) -> bool:
        """True if no further generation can begin in this process."""

    def abort(self, *, shards: bool = True) -> None:
        """Make every call raise until `begin`, including a call that is waiting.

        With `shards` False, calls that wait for another shard of this stage continue, and hidden
        states for the next stage are discarded.
        """


class StepLeader:
    """Implements `Lockstep`, over a socket to the other ranks.

    A generation begins when every other rank is ready and no step runs here.
    """

    def __init__(
        self,
        socket: ControlSocket,
        *,
        world_size: int,
        shards: int,
        places: tuple[int, int],
        neighbours: Neighbours,
        on_hello: Callable[[wire.Hello], None],
        on_opened: Callable[[int, int], None],
        on_token: Callable[[int, TokenOut], None],
        on_agreed: Callable[[int, int], None],
        on_broken: Callable[[Cause], None],
        on_ready: Callable[[], None],
        on_unusable: Callable[[KvflowError], None],
    ) -> None:
        """`shards` is the number of ranks in each stage. `places` are the numbers of pages and rows
        at this rank.

        `on_opened` is called with a rank and a ticket. `on_agreed` is called with a ticket and the
        number of its prompt's tokens that all ranks have cached. `on_broken` is called with the
        cause when a generation ends, and `on_unusable` when no further generation can begin in this
        process.
        """
        self._socket, self._world_size, self._neighbours = socket, world_size, neighbours
        self._shards = shards
        self._places = self._most_places = places
        self._on_hello = on_hello
        self._on_opened = on_opened
        self._on_token = on_token
        self._on_broken = on_broken
        self._on_agreed, self._on_ready, self._on_unusable = on_agreed, on_ready, on_unusable
        self._hits = HitVotes(world_size)
        self._hellos: dict[int, wire.Hello] = {}  # by rank, for ranks that are ready or take part
        self._ranks: dict[bytes, int] = {}  # rank by routing id
        self._generation = self._step = 0
        # By ticket: the last step before the request's latest preemption.
        self._preempted: dict[int, int] = {}
        self._open = self._stepping = False
        self._task: asyncio.Task[None] | None = None
        self.statuses: dict[int, wire.Status] = {}
        self.dropped = 0  # frames that were ignored

    def __repr__(self) -> str:
        state = "open" if self._open else "over"
        return f"<StepLeader: generation {self._generation} {state}, step {self._step}>"

    async def start(self) -> None:
        self._task = asyncio.create_task(self._read(), name="kvflow-steps-read")
        self._task.add_done_callback(self._ended)
        self._begin_if_complete()

    async def close(self) -> None:
        """End the generation, and stop reading messages."""
        self._end(Cause(Code.SHUTDOWN, "the first rank is shutting down"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended", task.get_name(), exc_info=error)
            self._on_unusable(
                LostError(
                    f"the first rank hears of no other any more: {type(error).__name__}: {error}"
                )
            )

    @property
    def unavailable_reason(self) -> str:
        """The reason why no step can run now. Empty while steps can run."""
        if self._open:
            return ""
        missing = [str(rank) for rank in range(1, self._world_size) if rank not in self._hellos]
        return f"rank {', '.join(missing) or 0} is not ready for a step"

    # --- Lockstep

    @property
    def ready(self) -> bool:
        return self._open

    @property
    def most_places(self) -> tuple[int, int]:
        return self._most_places

    def announce(self, rows: list[Row], requests: list[PrefillRequest]) -> None:
        self._step += 1
        self._stepping = True
        planned = tuple(
            wire.PlannedRow(request.ticket, row.sequence.computed, row.new, row.logits)
            for row, request in zip(rows, requests, strict=True)
        )
        self._send_all(wire.Plan(generation=self._generation, step=self._step, rows=planned))

    def preempt(self, request: PrefillRequest) -> None:
        # First tokens from steps up to this one are void; see `_receive`.
        self._preempted[request.ticket] = self._step
        self._hits.drop(request.ticket)
        self._send_all(wire.Preempt(ticket=request.ticket))

    def find(self, request: PrefillRequest, tokens: int) -> None:
        number = self._hits.ask(request.ticket, tokens)
        find = wire.Find(
            generation=self._generation, number=number, ticket=request.ticket, tokens=tokens
        )
        self._send_all(find)

    def flush(self) -> None:
        self._hits.clear()
        self._send_all(wire.Flush())

    def stepped(self, *, failed: bool = False) -> None:
        self._stepping = False
        if failed and self._shards > 1:
            # The other shards of this stage may wait for this rank within the same step.
            self._neighbours.abort()
        if self._neighbours.broken:
            self._on_unusable(LostError("the shards of the first stage have lost each other"))
        else:
            self._begin_if_complete()

    def break_off(self, cause: Cause) -> None:
        self._end(cause, 0)

    # --- requests

    def keep(self, ticket: int) -> None:
        """Announce that the group started a request, which keeps its places from now on."""
        self._send_all(wire.Keep(ticket=ticket))

    def drop(self, ticket: int, *, succeeded: bool = False) -> None:
        """Announce that no step names a request any more, and whether the request succeeded."""
        self._preempted.pop(ticket, None)
        self._hits.drop(ticket)
        self._send_all(wire.Drop(ticket=ticket, succeeded=succeeded))

    # --- ranks

    def lost(self, rank: int, why: str) -> None:
        found = self._hellos.pop(rank, None)
        self.statuses.pop(rank, None)
        if found is not None:
            self._ranks.pop(routing_id(found.member), None)
            self._end(Cause(Code.PEER_LOST, why))

    def _begin_if_complete(self) -> None:
        # While a step of the last generation still runs here, no other generation may begin.
        if self._open or self._stepping or len(self._hellos) < self._world_size - 1:
            return
        hellos = [self._hellos[rank] for rank in range(1, self._world_size)]
        pages, rows = self._places
        self._most_places = (
            min(pages, *(h.pages for h in hellos)),
            min(rows, *(h.rows for h in hellos)),
        )
        try:
            self._neighbours.begin(self._generation + 1)
        except KvflowError as error:
            self._on_unusable(error)
            return
        self._generation, self._step, self._open = self._generation + 1, 0, True
        self._preempted.clear()
        self._send_all(wire.Begin(generation=self._generation))
        log.info(
            "%d ranks are ready: generation %d of steps begins", self._world_size, self._generation
        )
        self._on_ready()

    def _end(self, cause: Cause, failed: int | None = None) -> None:
        """End the generation. `failed` is the rank whose step failed, if that is the reason.

        The shards of this stage run the announced step to its end together, unless it failed at one
        of them.
        """
        if not self._open:
            return
        self._open = False
        log.warning("generation %d of steps has ended: %s", self._generation, cause)
        if self._stepping:
            self._neighbours.abort(
                shards=self._shards > 1 and failed is not None and failed < self._shards
            )
        end = wire.End(
            generation=self._generation,
            cause=cause,
            failed=None if failed is None else Rank(failed),
        )
        self._send_all(end)
        # Each rank sends another Hello when it no longer holds anything of this generation.
        self._hellos.clear()
        self._hits.clear()
        self._on_broken(cause)

    def _send_all(self, message: wire.ToOthers) -> None:
        frame = wire.encode(message)
        for peer, rank in self._ranks.items():
            if not self._socket.send(frame, peer) and self._open:
                log.warning("rank %d cannot be reached", rank)
                # End the generation in the next turn of the loop, when every rank has this message,
                # and the announced step has begun here and holds its pages. If the step never began
                # here, the other shards of this stage would still run it, and wait for this one.
                asyncio.get_running_loop().call_soon(self._unreachable, peer, rank)

    def _unreachable(self, peer: bytes, rank: int) -> None:
        if self._ranks.get(peer) == rank:
            self.lost(rank, f"rank {rank} of the group cannot be reached")

    async def _read(self) -> None:
        """Receive messages until cancelled; a message that fails is dropped and counted (I7)."""
        while True:
            for peer_id, frame in await self._socket.receive():
                try:
                    self._receive(peer_id, frame)
                except WireError:
                    self.dropped += 1
                except Exception:
                    self.dropped += 1
                    log.exception("a message of a rank about steps failed")

    def _receive(self, peer_id: bytes, frame: bytes) -> None:
        message = wire.parse_at_first(frame)
        if isinstance(message, wire.Hello):
            self._on_rank_ready(peer_id, message)
            return
        rank = self._ranks.get(peer_id)
        if rank is None:
            self.dropped += 1
        elif isinstance(message, wire.Status):
            if message.rank == rank:
                self.statuses[rank] = message
        elif isinstance(message, wire.Opened):
            self._on_opened(rank, message.ticket)
        elif isinstance(message, wire.Found):
            if (agreed := self._hits.answer(rank, message.number, message.tokens)) is not None:
                self._on_agreed(*agreed)
        elif not self._open or message.generation != self._generation:
            self.dropped += 1
        elif isinstance(message, wire.FirstToken):
            # A preempted prompt is computed again, and may then yield a different token.
            if message.step > self._preempted.get(message.ticket, 0):
                self._on_token(message.ticket, message.token)
        else:
            self._end(message.cause, rank)

    def _on_rank_ready(self, peer_id: bytes, hello: wire.Hello) -> None:
        if peer_id != routing_id(hello.member) or not 1 <= hello.rank < self._world_size:
            self.dropped += 1
            return
        before = self._hellos.get(hello.rank)
        # During a generation, a Hello means that the rank left it, or has a new process.
        if self._open:
            self._end(Cause(Code.PEER_LOST, f"rank {hello.rank} of the group has begun anew"))
        if before is not None and before.member != hello.member:
            self._ranks.pop(routing_id(before.member), None)
        # `_end` clears the Hellos, so only `_ranks` may still hold the old routing id of a rank.
        for peer, rank in list(self._ranks.items()):
            if rank == hello.rank and peer != peer_id:
                del self._ranks[peer]
        self._ranks[peer_id] = hello.rank
        self._hellos[hello.rank] = hello
        self._on_hello(hello)
        self._begin_if_complete()
