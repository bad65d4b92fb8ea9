"""The engine of a rank that runs the announced steps, and sends its own pages to decode."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable

from kvflow.aio import all_ended
from kvflow.memory.page_waiter import PageWaiter
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError, LostError, WireError
from kvflow.protocols.ports import ControlSocket
from kvflow.serve.engine.model.sequence import Prompt, Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.followed import Followed, FollowedRoom
from kvflow.serve.engine.ranks.leading import Neighbours
from kvflow.serve.engine.scheduler.adjustments import Adjustments
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest, PrefillSteps
from kvflow.serve.engine.scheduler.turn import Loads

log = logging.getLogger("kvflow.serve.engine")
STATUS_S = 0.2
_Between = wire.Drop | wire.Preempt | wire.Keep | wire.Find | wire.Flush
"""Messages that the first rank sends between steps."""


class _GenerationOverError(Exception):
    """Raised to abandon work for a generation that ended."""


class StepFollower:
    """Runs the announced steps at a rank that is not the first.

    A request takes its places with the first step that names it. Steps have the same order at every
    rank, so requests take places in the same order too. The places become free when the first rank
    preempts the request or announces that no further step will name it, or when the generation
    ends. A request that fails at this rank is still computed until then, because the other ranks
    depend on it. The pages of a request are not sent before the group starts the request.

    A grammar is compiled in a thread, and the request is reported as opened when that is done. The
    first rank names a request with a grammar only then, so no step waits for a grammar, and other
    requests go on meanwhile.

    When the first rank asks about a request, this rank loads the request's cached pages from the
    host and locks them. The first step that names the request states how many tokens all ranks have
    cached.
    """

    def __init__(
        self,
        steps: PrefillSteps,
        socket: ControlSocket,
        *,
        hello: wire.Hello,
        status: Callable[[], wire.Status],
        neighbours: Neighbours,
        shards: int = 1,
        tells_openings: bool = False,
        owner: Hashable = "prefill",
        prefetch: PrefetchPolicy = "timeout",
    ) -> None:
        """`shards` is the number of ranks in each stage. With `tells_openings`, this rank reports
        every request that it opens, because the first rank may begin requests early. Without it,
        this rank reports those that have a grammar.

        `prefetch` decides how long an answer to the first rank waits for the pages to load.
        """
        self._shards, self._tells_openings = shards, tells_openings
        self.steps, self._socket, self._neighbours = steps, socket, neighbours
        self._hello, self._status = hello, status
        self._owner = owner
        self.requests: dict[int, Followed] = {}  # by ticket
        self._loads = Loads(steps, prefetch, self._answer)
        # The number of the first rank's question, by ticket, for requests that are still loading.
        self._questions: dict[int, int] = {}
        self.failed_steps = self.dropped = 0
        # Tickets that the first rank dropped before they were opened here.
        self._dropped_ahead: set[int] = set()
        self._opened = 0  # the last ticket opened here
        self._generation = self._step = 0
        self._open = self._over = self._stepping = self._finishing = False
        self.unusable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails once no further generation can begin in this process."""
        self._failed = 0  # the last generation in which a step failed here
        self._queue: deque[wire.Plan | _Between] = deque()
        self._wake = asyncio.Event()
        self._returned = PageWaiter(self._wake.set, steps.pages, steps.rows)
        self._tasks: list[asyncio.Task[None]] = []
        self._compiling: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._read(), name="kvflow-steps-read"),
            asyncio.create_task(self._run(), name="kvflow-steps-run"),
            asyncio.create_task(self._tell(), name="kvflow-steps-status"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        self._say_hello()

    async def close(self) -> None:
        """End the generation, and wait for the running step even if cancelled (I12)."""
        # Set this first: without it, this rank could still run steps of the ended generation.
        self._closing = True
        self._end(Cause(Code.SHUTDOWN, "this rank is shutting down"))
        self._wake.set()
        # `_run` is not cancelled, because it has to finish the running step.
        for task in (self._tasks[0], self._tasks[2]) if self._tasks else ():
            task.cancel()
        for task in self._compiling:
            task.cancel()
        try:
            await all_ended([*self._tasks, *self._compiling])
        finally:
            self._returned.close()
            await self._loads.close()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s ended", task.get_name(), exc_info=error)
            # If only this task ended, the first rank would wait for this process forever.
            self._give_up(
                LostError(f"the steps of this rank have ended: {type(error).__name__}: {error}")
            )

    def _give_up(self, error: KvflowError) -> None:
        if not self.unusable.done():
            self.unusable.set_exception(error)

    # --- requests

    def add(
        self,
        ticket: int,
        room: FollowedRoom,
        prompt: Prompt,
        params: SamplingParams,
        namespace: Namespace = ANY,
    ) -> None:
        """Add a request that was opened here. Each ticket is larger than the one before."""
        self._opened = max(self._opened, ticket)
        dropped = ticket in self._dropped_ahead
        self._dropped_ahead = {ahead for ahead in self._dropped_ahead if ahead > ticket}
        if dropped:
            return
        found = self.requests[ticket] = Followed(room, prompt, params, namespace)
        if params.grammar is None or not self.steps.samples:
            self._tell_opened(ticket, found)
            return
        found.compiling = True
        task = asyncio.create_task(self._compile(ticket, found), name=f"kvflow-grammar-{ticket}")
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    async def _compile(self, ticket: int, found: Followed) -> None:
        try:
            sequence = self._sequence(ticket, found)
            found.adjustments = await self.steps.compiled(found.params, sequence)
        except KvflowError as error:
            found.room.close(error.cause())
            return
        # The error belongs to one room, and must not end the others.
        except Exception as error:
            log.exception("compiling a grammar failed")
            text = f"compiling the grammar failed: {type(error).__name__}"
            found.room.close(Cause(Code.ENGINE_ERROR, text))
            return
        found.compiling = False
        if self.requests.get(ticket) is found:
            self._tell_opened(ticket, found)

    def _tell_opened(self, ticket: int, found: Followed) -> None:
        if self._tells_openings or found.params.grammar is not None:
            self._socket.send(wire.encode(wire.Opened(ticket=ticket)))

    def started(self, ticket: int) -> None:
        if found := self.requests.get(ticket):
            found.started = True
            self._send_computed(found)

    def _keep(self, ticket: int) -> None:
        if found := self.requests.get(ticket):
            found.kept = True
            self._send_computed(found)

    def _send_computed(self, found: Followed) -> None:
        if found.request is not None and found.may_send:
            found.request.sent_pages = self._sent(found)
            self._send(found.request)

    # --- the first rank

    async def _read(self) -> None:
        """Receive messages until cancelled; a message that fails is dropped and counted (I7)."""
        while True:
            for _, frame in await self._socket.receive():
                try:
                    self._receive(wire.parse_at_others(frame))
                except WireError:
                    self.dropped += 1
                except Exception:
                    self.dropped += 1
                    log.exception("a message of the first rank failed")

    def _receive(self, message: wire.ToOthers) -> None:
        if isinstance(message, wire.Begin):
            self._begin(message)
        elif isinstance(message, wire.End):
            if message.generation == self._generation:
                self._end(message.cause, message.failed)
        elif isinstance(message, wire.Plan | wire.Find) and not (
            self._open and message.generation == self._generation
        ):
            self.dropped += 1
        elif isinstance(message, wire.Keep) and not self._awaits_preemption(message.ticket):
            # This message is not queued: computed pages need not wait for the queued steps.
            self._keep(message.ticket)
        else:
            self._queue.append(message)
            self._wake.set()

    def _begin(self, message: wire.Begin) -> None:
        if self._open or message.generation <= self._generation:
            self.dropped += 1
            return
        try:
            self._neighbours.begin(message.generation)
        except KvflowError as error:
            self._give_up(error)
            return
        self._generation, self._step, self._open = message.generation, 0, True

    def _end(self, cause: Cause, failed: int | None = None) -> None:
        """End the generation: abort the running step, after which `_run` frees all places.

        The shards of the first stage instead run the announced steps to their end, because the
        first rank waits for the other shards within each layer. If a step failed at one of these
        shards, they abort too.
        """
        if self._open:
            self._open, self._over = False, True
            self._finishing = self._shards > self._hello.rank and (
                failed is None or failed >= self._shards
            )
            log.warning("generation %d of steps has ended: %s", self._generation, cause)
            if self._stepping or self._finishing:
                self._neighbours.abort(shards=not self._finishing)
            self._wake.set()

    def _say_hello(self) -> None:
        if self._neighbours.broken:
            self._give_up(LostError("the shards of this stage have lost each other"))
            return
        self._socket.send(wire.encode(self._hello))
        # The first rank may have dropped the reports that came before this message.
        for ticket, found in self.requests.items():
            if found.params.grammar is not None and not found.compiling:
                self._tell_opened(ticket, found)

    async def _tell(self) -> None:
        told: wire.Status | None = None
        while True:
            now = self._status()
            if now != told:
                self._socket.send(wire.encode(now))
                told = now
            await asyncio.sleep(STATUS_S)

    # --- steps

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            if self._over and not (self._finishing and self._queue):
                self._over = self._finishing = False
                self._forget()
                self._say_hello()
            if not self._queue:
                self.steps.runner.rest()
                await self._wake.wait()
                continue
            message = self._queue.popleft()
            if not isinstance(message, wire.Plan):
                self._apply(message)
                continue
            # After a failed step the requests lag behind the plan, so no later step can run.
            if message.generation == self._failed:
                continue
            try:
                await self._execute(message)
            except _GenerationOverError:
                continue
            except Exception as error:  # noqa: BLE001
                # Every error is reported, because the other ranks wait for this one.
                # If the generation ended meanwhile, the step was aborted, and no rank waits, unless
                # the shards of this stage run it to its end.
                if self._open or self._finishing:
                    self._report_failure(error)
        self._forget()

    def _report_failure(self, error: Exception) -> None:
        """Report a failed step, because the other ranks wait for data that will not come."""
        self.failed_steps += 1
        log.exception("a prefill step failed")
        if not self._open:
            # Only the other shards of this stage still wait, and within the step itself.
            self._finishing = False
            self._neighbours.abort()
            return
        self._failed = self._generation
        cause = Cause(Code.ENGINE_ERROR, f"prefill step failed: {type(error).__name__}")
        if isinstance(error, KvflowError):
            cause = error.cause()
        self._socket.send(wire.encode(wire.StepFailed(generation=self._generation, cause=cause)))

    def _forget(self) -> None:
        """Free all that the ended generation took, while no step runs."""
        messages, self._queue = self._queue, deque()
        for message in messages:
            # Drop, Preempt, Keep and Flush outlast the generation; its steps and questions do not.
            if not isinstance(message, wire.Plan | wire.Find):
                self._apply(message)
        for ticket, found in list(self.requests.items()):
            if found.request is not None:
                self._drop(ticket)

    def _apply(self, message: _Between) -> None:
        if isinstance(message, wire.Drop):
            self._drop(message.ticket, succeeded=message.succeeded)
        elif isinstance(message, wire.Keep):
            self._keep(message.ticket)
        elif isinstance(message, wire.Find):
            self._find(message)
        elif isinstance(message, wire.Flush):
            self._flush()
        elif found := self.requests.get(message.ticket):
            self._give_back(found)

    def _awaits_preemption(self, ticket: int) -> bool:
        return any(
            isinstance(message, wire.Preempt) and message.ticket == ticket
            for message in self._queue
        )

    def _find(self, message: wire.Find) -> None:
        """Lock the cached pages of a request, and load those that only the host has.

        This happens in the order of the steps. So pages from earlier steps are already cached, and
        the locked and loaded pages fit into the pool along with those of all other requests.
        """
        found = self.requests.get(message.ticket)
        if found is None or found.request is not None or found.compiling:
            self._socket.send(wire.encode(wire.Found(number=message.number, tokens=0)))
            return
        found.request = request = self._new_request(message.ticket, found)
        self.steps.find(request, message.tokens)
        self._questions[message.ticket] = message.number
        if not self._loads.begin(request):
            self._answer(request)

    def _answer(self, request: PrefillRequest) -> None:
        tokens = 0 if request.prefix is None else request.prefix.tokens
        number = self._questions.pop(request.ticket)
        self._socket.send(wire.encode(wire.Found(number=number, tokens=tokens)))

    def _give_back(self, found: Followed) -> None:
        """Stop a request's load, and free its places or unlock its cached pages. Idempotent."""
        request, found.request = found.request, None
        if request is not None:
            self._loads.stop(request)
            self._questions.pop(request.ticket, None)
            self.steps.give_back(request)

    def _flush(self) -> None:
        if self.steps.cache is not None:
            self.steps.cache.flush()
        for found in self.requests.values():
            if found.request is not None and not found.request.sequence.page_count:
                self._give_back(found)

    def _drop(self, ticket: int, *, succeeded: bool = False) -> None:
        found = self.requests.pop(ticket, None)
        if found is None:
            if ticket > self._opened:
                self._dropped_ahead.add(ticket)
        elif found.request is not None:
            if succeeded:
                self.steps.keep(found.request)
            self._give_back(found)

    async def _execute(self, plan: wire.Plan) -> None:
        """Run one step. Raises: WireError, CapacityError, and whatever the model raises."""
        self._step += 1
        if plan.step != self._step:
            raise WireError(
                f"step {plan.step} of generation {plan.generation} came instead of {self._step}"
            )
        if len({row.ticket for row in plan.rows}) != len(plan.rows):
            raise WireError(f"step {plan.step} names a request twice")
        requests = [await self._ready(row) for row in plan.rows]
        rows = [
            _row(planned, request) for planned, request in zip(plan.rows, requests, strict=True)
        ]
        self._stepping = True
        try:
            await self.steps.run(rows, requests)
        finally:
            self._stepping = False
        for request in requests:
            if request.choice is not None:
                token = self.steps.token_out(request, request.choice)
                report = wire.FirstToken(
                    generation=plan.generation, step=plan.step, ticket=request.ticket, token=token
                )
                self._socket.send(wire.encode(report))
            if self.requests[request.ticket].may_send:
                self._send(request)

    def _send(self, request: PrefillRequest) -> None:
        try:
            self.steps.send(request)
        except KvflowError as error:
            request.room.close(error.cause())
        # An error in one room must not end the others.
        except Exception as error:
            self.failed_steps += 1
            log.exception("sending pages failed")
            request.room.close(
                Cause(Code.ENGINE_ERROR, f"sending pages failed: {type(error).__name__}")
            )

    async def _ready(self, row: wire.PlannedRow) -> PrefillRequest:
        """Return the request that `row` names, once it has places. Raises: WireError."""
        found = self.requests.get(row.ticket)
        if found is None:
            raise WireError(f"a step names request {row.ticket}, which there is not")
        if found.compiling:
            raise WireError(
                f"a step names request {row.ticket}, and this rank has not compiled its grammar yet"
            )
        request = found.request = found.request or self._new_request(row.ticket, found)
        if self._loads.is_running(request):
            raise WireError(
                f"a step names request {row.ticket}, and this rank has not said yet what it has of "
                "it"
            )
        if not request.sequence.page_count:
            await self._take_places(request, row.start)
            if found.may_send and request.cached_tokens:
                self._send(request)
        if request.sequence.computed != row.start:
            text = f"a step begins at token {row.start} of request {row.ticket}, and this rank at"
            raise WireError(f"{text} {request.sequence.computed}")
        return request

    async def _take_places(self, request: PrefillRequest, start: int) -> None:
        """Take the places for the prompt from token `start` on; wait until enough are free.

        All ranks have the tokens before `start` cached.
        """
        self.steps.agree(request, start)
        missing = request.sequence.pages_missing(request.sequence.prompt_length)
        if missing > self.steps.pages.capacity:
            size = self.steps.layout.page_size
            raise CapacityError(
                "prompt tokens in this rank's pool",
                missing * size,
                self.steps.pages.capacity * size,
            )
        self._returned.look()
        while max(self.steps.short_of(request)) > 0:
            self._returned.wait()
            await self._woken()
            self._returned.look()
        self.steps.take_places(request)
        self.steps.count(request)

    def _new_request(self, ticket: int, found: Followed) -> PrefillRequest:
        sequence = self._sequence(ticket, found)
        if found.adjustments is not None:
            adjustments: Adjustments | None = found.adjustments.over(sequence)
        else:
            adjustments = self.steps.adjustments_of(found.params, sequence)
        request = PrefillRequest(
            sequence,
            found.room,
            found.params,
            adjustments,
            ticket=ticket,
            namespace=found.namespace,
        )
        if found.may_send:
            request.sent_pages = self._sent(found)
        return request

    def _sequence(self, ticket: int, found: Followed) -> Sequence:
        return Sequence((self._owner, ticket), found.prompt, 0, self.steps.layout.page_size)

    def _sent(self, found: Followed) -> int:
        """Return the number of pages of a prompt that decode has already."""
        return self.steps.layout.first_page(len(found.prompt), found.room.prefix_tokens)

    async def _woken(self) -> None:
        self._check_open()
        self._wake.clear()
        await self._wake.wait()
        self._check_open()

    def _check_open(self) -> None:
        if not (self._open or self._finishing) or self._closing:
            raise _GenerationOverError


def _row(planned: wire.PlannedRow, request: PrefillRequest) -> Row:
    left = request.sequence.prompt_length - request.sequence.computed
    if planned.count > left or planned.logits > planned.count:
        text = (
            f"{planned.count} tokens and {planned.logits} logits of request {planned.ticket}, "
            f"{left} tokens are left"
        )
        raise WireError(f"a step asks for {text}")
    return Row(request.sequence, planned.count, planned.logits)
