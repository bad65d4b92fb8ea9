"""A stand-in for vLLM's engine that keeps its rules where connectors are concerned.

The rules are those of vLLM 0.32 (v1/core/sched/scheduler.py).
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from kvflow.connectors.vllm.groups import Blocks, Group, Groups
from kvflow.connectors.vllm.messages import StepMeta, StepNews
from tests.connectors.vllm.worker_pair import ONE_GROUP, PAGES


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


class Request:
    def __init__(self, name: str, tokens: int, number: int) -> None:
        self.request_id, self.num_prompt_tokens, self.num_computed_tokens = name, tokens, 0
        self.prompt_token_ids = [number, *range(tokens - 1)]
        self._all_token_ids = list(self.prompt_token_ids)
        self.lora_request, self.mm_features = None, ()
        self.sampling_params, self.max_tokens = None, 16
        self.trace_headers: dict[str, str] | None = None
        self.status, self.lives = Status.WAITING, 0  # a preemption begins another life
        self.blocks: list[list[Block]] = []  # of each group, in vLLM's order
        self.steps_left, self.hit = 2, 0
        # What its tokens leave in the cache: no two neighbours alike, nothing 0.
        self.number, self.content = number, content_of(tokens, number)

    @property
    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in own] for own in self.blocks)


def content_of(tokens: int, number: int) -> np.ndarray[Any, Any]:
    return ((np.arange(tokens) * 7 + number * 31) % 250 + 1).astype(np.uint8)


def state_of(tokens: int, number: int) -> int:
    """What the state holds after so many tokens."""
    return (tokens * 5 + number * 13) % 250 + 1


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0


class BlockPool:
    def __init__(self, pages: int) -> None:
        self.blocks = [Block(n) for n in range(pages)]
        # As in vLLM, the first one is handed out in place of those that are not needed any more.
        self.null = self.blocks[0]
        self.free = deque(self.blocks[1:])

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block is self.null:
                continue
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, f"block {block.block_id} is freed twice"
            if not block.ref_cnt:
                self.free.appendleft(block)  # used again at once

    def take(self, count: int) -> list[Block] | None:
        if count > len(self.free):
            return None
        found = [self.free[n] for n in range(count)]
        self.touch(found)
        return found


@dataclass
class Step:
    meta: bytes  # as vLLM carries it to each worker
    counts: dict[str, int] = field(default_factory=dict)
    # Request: its life, tokens when the step is over.
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    outputs: list[Any] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return self.counts


class Engine:
    """`scheduler` is the connector's side in the scheduler, `workers` those in the workers."""

    def __init__(
        self, scheduler: Any, workers: Sequence[Any], groups: Groups = ONE_GROUP, pages: int = PAGES
    ) -> None:
        self.scheduler, self.workers, self.pool = scheduler, workers, BlockPool(pages)
        self.groups, self.by_number = groups, sorted(groups.groups)
        self.requests: dict[str, Request] = {}
        self.steps: deque[Step] = deque()
        self.ended: dict[str, str] = {}

    def add(self, request: Request, params: Any) -> None:
        self.requests[request.request_id] = request
        self.scheduler.new_request(request, params)

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is not None and not request.is_finished:
            self.finish(request, Status.FINISHED_ABORTED)

    def finish(self, request: Request, status: Status, delay: bool = False) -> Any:
        assert request.request_id not in self.ended, "it ends twice"
        request.status, self.ended[request.request_id] = status, status.name
        delay_too, answer = self._connector_finished(request)
        if not (delay or delay_too):
            self.free(request)
        return answer

    def free(self, request: Request) -> None:
        assert request.is_finished
        self.release(request)
        del self.requests[request.request_id]

    def release(self, request: Request) -> None:
        for own in request.blocks:
            self.pool.free_blocks(reversed(own))
        request.blocks = []

    def allocate(self, request: Request, computed: int, end: int) -> bool:
        """Take blocks for the tokens up to `end`, of which `computed` are there. Blocks behind a
        window are left out, or given back. False, and nothing, where there are too few.
        """
        request.blocks = request.blocks or [[] for _ in self.by_number]
        self.trim(request, computed)
        wanted = [
            max(0, (-(-end // size) if (size := group.space.page_size) else 1) - len(own))
            for group, own in zip(self.by_number, request.blocks, strict=True)
        ]
        skipped = [
            min(more, max(0, _skipped(group, computed) - len(own)))
            for group, own, more in zip(self.by_number, request.blocks, wanted, strict=True)
        ]
        taken = self.pool.take(sum(wanted) - sum(skipped))
        if taken is None:
            return False
        for own, more, nulls in zip(request.blocks, wanted, skipped, strict=True):
            own.extend([self.pool.null] * nulls + taken[: more - nulls])
            del taken[: more - nulls]
        return True

    def trim(self, request: Request, computed: int) -> None:
        """Give back the blocks that no window reaches after the first `computed` tokens."""
        for group, own in zip(self.by_number, request.blocks, strict=False):
            for n in range(min(len(own), _skipped(group, computed))):
                self.pool.free_blocks([own[n]])
                own[n] = self.pool.null

    def execute(self) -> bool:
        """Run the oldest step that has not run, at all workers."""
        for step in self.steps:
            if not step.outputs:
                step.outputs = [
                    self._run(worker, step, pickle.loads(step.meta)) for worker in self.workers
                ]
                return True
        return False

    def process(self) -> bool:
        """Take the oldest step's output, if it has run."""
        if not self.steps or not self.steps[0].outputs:
            return False
        self._process(self.steps.popleft())
        return True

    def check_content(self, request: Request, tokens: int) -> None:
        """What attention, or a state, reads for the token after the first `tokens`."""
        for n, worker in enumerate(self.workers):
            for group, ids in zip(self.by_number, request.block_ids, strict=True):
                where, size = worker.thread.pool.array(group.layers[0]), group.space.page_size
                said = f"{request.request_id}: wrong bytes of {group.space.name} at worker {n}"
                if not size:
                    assert (where[ids[0]] == state_of(tokens, request.number)).all(), said
                    continue
                first = max(0, tokens - group.space.window) if group.space.window else 0
                for token in range(first, tokens):
                    found = where[ids[token // size]].reshape(size, -1)[token % size]
                    assert (found == request.content[token]).all(), said

    def write(
        self, worker: Any, request: Request, tokens: range, block_ids: Blocks | None = None
    ) -> None:
        """What the model does with these tokens at one worker."""
        each = request.block_ids if block_ids is None else block_ids
        for group, ids in zip(self.by_number, each, strict=True):
            where, size = worker.thread.pool.array(group.layers[0]), group.space.page_size
            if not size and tokens:
                where[ids[0]] = state_of(tokens.stop, request.number)
            for token in tokens if size else ():
                if (block := ids[token // size]) != self.pool.null.block_id:
                    where[block].reshape(size, -1)[token % size] = request.content[token]

    def _connector_finished(self, request: Request) -> tuple[bool, Any]:
        raise NotImplementedError

    def _run(self, worker: Any, step: Step, meta: StepMeta) -> Any:
        raise NotImplementedError

    def _process(self, step: Step) -> None:
        raise NotImplementedError


class PrefillEngine(Engine):
    def __init__(
        self, scheduler: Any, workers: Sequence[Any], groups: Groups = ONE_GROUP, pages: int = PAGES
    ) -> None:
        super().__init__(scheduler, workers, groups, pages)
        scheduler.block_ids_of = lambda name: self.requests[name].block_ids
        scheduler.num_blocks = pages - 1
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.answers: dict[str, Any] = {}
        self.preemptions = 0
        self._remaining: Counter[str] = Counter()

    def add(self, request: Request, params: Any) -> None:
        super().add(request, params)
        self.waiting.append(request)

    def finish(self, request: Request, status: Status, delay: bool = False) -> Any:
        (self.running if request in self.running else self.waiting).remove(request)
        return super().finish(request, status, delay)

    def schedule(self, count: int, preempts: bool) -> None:
        """`count` tokens of each request; those that run come first."""
        step = Step(b"")
        if preempts and self.running:
            self._preempt(self.running[-1], step)
        for request in list(self.running):
            self._grow(request, count, step)
        if not step.preempted_req_ids:
            self._admit(count, step)
        meta = StepMeta()
        self.scheduler.build_meta(meta, step)
        step.meta = pickle.dumps(
            (meta, {name: self.requests[name].block_ids for name in step.counts})
        )
        for name, tokens in step.counts.items():
            self.requests[name].num_computed_tokens += tokens
        self.steps.append(step)

    def _grow(self, request: Request, count: int, step: Step) -> None:
        """One that runs takes blocks from the last ones that do, itself among them."""
        if request.num_computed_tokens >= request.num_prompt_tokens:
            return
        while request.status is Status.RUNNING and not self._compute(request, count, step):
            self._preempt(self.running[-1], step)

    def _admit(self, count: int, step: Step) -> None:
        for request in list(self.waiting):
            if not self.scheduler.may_begin(request):
                continue
            if self.groups.most_blocks(request.num_prompt_tokens) > len(self.pool.free):
                return
            assert self._compute(request, count, step)
            self.scheduler.allocated(request)
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING

    def _compute(self, request: Request, count: int, step: Step) -> bool:
        end = min(request.num_prompt_tokens, request.num_computed_tokens + count)
        if not self.allocate(request, request.num_computed_tokens, end):
            return False
        step.counts[request.request_id] = end - request.num_computed_tokens
        step.ends[request.request_id] = request.lives, end
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        self.release(request)
        self.running.remove(request)
        self.waiting.insert(0, request)
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        request.lives += 1
        step.preempted_req_ids.add(request.request_id)
        for planned in (step.counts, step.ends):
            planned.pop(request.request_id, None)
        self.preemptions += 1

    def _connector_finished(self, request: Request) -> tuple[bool, Any]:
        self.trim(request, request.num_computed_tokens)
        found: tuple[bool, Any] = self.scheduler.finished(request, request.block_ids)
        return found

    def _run(self, worker: Any, step: Step, meta: Any) -> Any:
        told, blocks = meta
        worker.preempt(told)
        worker.begin(told)
        for name, (_, end) in step.ends.items():  # also of requests that were aborted meanwhile
            if (request := self.requests.get(name)) is not None:
                self.write(worker, request, range(end - step.counts[name], end), blocks[name])
        worker.computed(told)
        return worker.finished(told)

    def _process(self, step: Step) -> None:
        for name, (life, end) in step.ends.items():
            request = self.requests.get(name)
            # A connector that hands blocks over.
            if request is None or request.is_finished or life != request.lives:
                continue
            if end == request.num_prompt_tokens:
                self.answers[name] = self.finish(request, Status.FINISHED_LENGTH_CAPPED)
        sent = _all_told(step.outputs, self._remaining)
        self.scheduler.sent(sent)
        for name in sent:
            self.free(self.requests[name])


class DecodeEngine(Engine):
    def __init__(
        self,
        scheduler: Any,
        workers: Sequence[Any],
        groups: Groups = ONE_GROUP,
        pages: int = PAGES,
        *,
        recomputes: bool,
    ) -> None:
        super().__init__(scheduler, workers, groups, pages)
        scheduler.block_pool = self.pool
        self._recomputes = recomputes
        self._remaining: Counter[str] = Counter()
        self._failed_pending: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self.loaded = self.failures = 0

    def schedule(self) -> None:
        is_full = False
        for request in list(self.requests.values()):
            if (
                request.status is Status.WAITING_FOR_REMOTE_KVS
                and request.request_id in self._received
            ):
                self._promote(request)
            if request.status is Status.WAITING:
                is_full = is_full or not self._admit(request)
            elif request.status is Status.RUNNING:
                request.steps_left -= 1
                self.check_content(request, request.num_prompt_tokens)
                if not request.steps_left:
                    self.finish(request, Status.FINISHED_LENGTH_CAPPED)
        meta = StepMeta()
        self.scheduler.build_meta(meta)
        self.steps.append(Step(pickle.dumps(meta)))

    def finish(self, request: Request, status: Status, delay: bool = False) -> Any:
        name = request.request_id
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            delay = name not in self._received
            self._received.discard(name)
            self._failed.discard(name)
        return super().finish(request, status, delay)

    def _promote(self, request: Request) -> None:
        name = request.request_id
        self._received.remove(name)
        request.status = Status.WAITING
        if name in self._failed:
            self._failed.remove(name)
            self.release(request)
        else:
            moved = self.groups.tokens_moved(request.num_prompt_tokens)
            self.check_content(request, moved)
            # The last token is computed here, where it has not come.
            for worker in self.workers:
                self.write(worker, request, range(moved, request.num_prompt_tokens))
            self.loaded += 1
            request.status = Status.RUNNING

    def _admit(self, request: Request) -> bool:
        """False when it has to wait for blocks, and all behind it with it."""
        tokens = request.num_prompt_tokens
        cached = request.hit
        external = self.scheduler.tokens_to_load(request, cached)
        if external is None:
            return True
        if not self.allocate(request, cached + external if external else 0, tokens):
            self.release(request)
            return False
        self.scheduler.allocated(request, request.block_ids, external)
        for worker in self.workers:
            self.write(worker, request, range(cached if external else tokens))
        request.status = Status.WAITING_FOR_REMOTE_KVS if external else Status.RUNNING
        return True

    def _connector_finished(self, request: Request) -> tuple[bool, Any]:
        self.scheduler.finished(request)
        return False, None

    def _run(self, worker: Any, step: Step, meta: Any) -> Any:
        worker.begin(meta)
        received, failed = worker.finished()
        return received, failed, worker.take_news()

    def _process(self, step: Step) -> None:
        received = _all_told([output[0] for output in step.outputs], self._remaining)
        for output in step.outputs:
            self._failed_pending |= output[1]
        failed = self._failed_pending & received
        self._failed_pending -= failed
        for name in failed:
            request = self.requests[name]
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            self.failures += 1
            if self._recomputes:
                self._failed.add(name)
            else:
                assert request.trace_headers, "its client is not told why"
                self.finish(request, Status.FINISHED_ERROR)
        news = [output[2] for output in step.outputs if output[2] is not None]
        told = news[0] if news else StepNews()
        for more in news[1:]:
            told = told.aggregate(more)
        self.scheduler.update(told, received)
        for name in received:
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self._received.add(name)
            else:
                self.free(request)


def _skipped(group: Group, computed: int) -> int:
    """How many blocks attention no longer reads when it computes the next token."""
    window = group.space.window
    return max(0, computed - window) // group.space.page_size if window else 0


def _all_told(outputs: Sequence[set[str]], remaining: Counter[str]) -> set[str]:
    """As `KVOutputAggregator`: what the last of the workers has told."""
    found = set()
    for names in outputs:
        for name in names:
            remaining[name] += 1
            if remaining[name] == len(outputs):
                found.add(name)
                del remaining[name]
    return found
