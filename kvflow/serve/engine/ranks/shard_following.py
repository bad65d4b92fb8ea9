"""A decode shard that runs the first shard's steps over its part of the shared pool."""

from __future__ import annotations

import asyncio

import numpy as np

from kvflow.aio import Threads, all_ended
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.arguments import unpack_pages
from kvflow.protocols.errors import LostError, WireError
from kvflow.protocols.limits import Timing
from kvflow.protocols.ports import ProcessIdentity
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.runner import Runner
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.ranks import shard_wire as wire


class ShardFollower:
    """Runs the announced steps. Each step states its sequences and their pages."""

    def __init__(
        self, model: LoadedModel, link: wire.ShardLink, executor: Threads, process: ProcessIdentity
    ) -> None:
        """`executor` runs the model thread. `process` identifies this process, which the first
        shard may kill.
        """
        self._model, self._link, self._executor, self._process = model, link, executor, process
        self._sequences: dict[int, Sequence] = {}  # of the last step, by number
        self._pool: PagedPool | None = None
        self._runner: Runner | None = None
        self._steps = 0

    async def run(self) -> None:
        """Run steps until the first shard closes the connection.

        Raises: WireError for an invalid step, LostError if a shard is gone, and what the model
        raises.
        """
        beating = asyncio.create_task(self._beat(), name="kvflow-shard-alive")
        try:
            await self._executor.run(self._follow)
        finally:
            # The link is aborted first, which notifies the first shard before this process ends.
            self._link.abort()
            beating.cancel()
            try:
                await all_ended([beating])
            finally:
                if self._pool is not None:
                    self._pool.close()

    def stop(self) -> None:
        """Make `run` return after the running step; the first shard counts this one as lost."""
        self._link.abort()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(Timing().heartbeat_s)
            try:
                self._link.send(wire.Alive())
            except LostError:
                return

    def _follow(self) -> None:
        self._link.send(wire.Hello(self._process))
        while True:
            try:
                frame = self._link.receive()
            except LostError:
                return
            message = wire.parse_at_others(frame)
            if isinstance(message, wire.MapPool):
                self._map(message)
            elif isinstance(message, wire.Plan):
                self._execute(message)
            else:
                self._sequences = {}
                if self._runner is not None:
                    self._runner.rest()

    def _map(self, message: wire.MapPool) -> None:
        message.layout.check()
        segment = SharedSegment.open_peer(message.pid, message.descriptor)
        segment.prefault()
        self._pool = PagedPool.mapped(message.layout, segment)
        self._runner = self._model.runner(self._pool)
        self._link.send(wire.Ended(0))

    def _execute(self, plan: wire.Plan) -> None:
        runner = self._runner
        if runner is None or plan.step != self._steps + 1:
            raise WireError(f"step {plan.step} came after step {self._steps}")
        self._steps = plan.step
        rows = self._rows(plan)
        runner.forward(rows)
        try:
            self._link.send(wire.Ended(plan.step))
        except LostError:
            # The next receive raises too, and ends the loop.
            return

    def _rows(self, plan: wire.Plan) -> list[Row]:
        before, self._sequences = self._sequences, {}
        return [self._row(planned, before) for planned in plan.rows]

    def _row(self, planned: wire.PlannedRow, before: dict[int, Sequence]) -> Row:
        assert self._pool is not None
        layout = self._pool.layout
        found = before.get(planned.sequence)
        if planned.capacity:
            found = Sequence(planned.sequence, [], planned.capacity, layout.page_size)
            found.rows = unpack_pages(planned.row, layout.num_rows)
        elif found is None:
            raise WireError(
                f"a step goes on with sequence {planned.sequence}, which was not in the step before"
            )
        self._sequences[planned.sequence] = found
        tokens = np.frombuffer(planned.tokens, np.int64)
        end = planned.computed + tokens.size
        pages = unpack_pages(planned.pages, layout.num_pages)
        if (
            not tokens.size
            or end > found.tokens.size
            or end > (found.page_count + pages.size) * layout.page_size
        ):
            raise WireError(
                f"sequence {planned.sequence}: tokens {planned.computed}..{end} have no place there"
            )
        found.add_pages(pages)
        found.tokens[planned.computed : end] = tokens
        found.computed, found.length = planned.computed, end
        return Row(found, tokens.size, planned.logits)
