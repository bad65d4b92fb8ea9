"""Both sides of the connector against vLLM's rules, over real nodes, with random events.

What a run meets depends on its seed and on the machine's clock.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

import msgspec
import pytest

from kvflow.connectors.vllm import prefill_scheduler, prefill_worker
from kvflow.connectors.vllm.decode_scheduler import DecodeScheduler
from kvflow.connectors.vllm.decode_worker import DecodeWorker
from kvflow.connectors.vllm.groups import Groups
from kvflow.connectors.vllm.params import ROOM, FromPrefill, ToDecode
from kvflow.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.node.threads.rooms import PrefillThreadRoom
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import Space
from tests.connectors.vllm.vllm_rules import DecodeEngine, Engine, PrefillEngine, Request
from tests.connectors.vllm.worker_pair import (
    FULL,
    MANY_GROUPS,
    ONE_GROUP,
    PAGE_SIZE,
    PAGES,
    WINDOW,
    Gate,
    new_decode,
    new_prefill,
    pool_of,
)

REQUESTS, PATIENCE_S = 25, 20.0
TIGHT = 9  # one is vLLM's null block; blocks of a pool in which two prompts have a place, or one
NO_END = "no end within"


class Registries(FromPrefill, frozen=True):
    """Prefill's workers where they are, instead of behind ports that follow each other."""

    addresses: tuple[str, ...] = ()

    def registry(self, rank: int) -> str:
        return self.addresses[rank]


class Game:
    def __init__(
        self, seed: int, prefill: PrefillEngine, decode: DecodeEngine, gates: list[Gate], wake: Any
    ) -> None:
        self.random = random.Random(seed)
        self.prefill, self.decode, self._gates, self._wake = prefill, decode, gates, wake
        self._addresses = tuple(worker.thread.registry for worker in prefill.workers)
        # Legs that their proxy has not posted yet.
        self._coming: list[tuple[Engine, Request, Any]] = []
        self._sequential: dict[str, Request] = {}  # decode's legs, while prefill computes
        self.preempts = False
        self.patience_s, self.crowds, self.aborts = PATIENCE_S, False, 0.05

    def play(self) -> None:
        for number in range(REQUESTS):
            self._arrive(number)
        if self.crowds:
            self.random.shuffle(self._coming)
            for engine, request, params in self._coming:
                engine.add(request, params)
            self._coming.clear()
        deadline = monotonic() + self.patience_s
        while not self._is_over():
            assert monotonic() < deadline, (
                f"{NO_END} {self.patience_s:g} s: {self.prefill.ended} {self.decode.ended}"
            )
            if self._coming or self._sequential:
                self._turn()
                continue
            for gate in self._gates:
                gate.open.set()
            self._wake.clear()
            for engine in (self.prefill, self.decode):
                self._step(engine)
            self._answer()
            self._wake.wait(0.002)
        self._check_rest()

    def _arrive(self, number: int) -> None:
        tokens, name = self.random.randint(1, 5 * PAGE_SIZE), f"request {number}"
        source, target = Request(name, tokens, number), Request(name, tokens, number)
        size = max(group.space.page_size for group in self.prefill.by_number)
        target.hit = size * self.random.choice((0, 0, self.random.randint(0, (tokens - 1) // size)))
        target.steps_left = self.random.randint(1, 3)
        if self.random.random() < 0.5:
            self._coming.append((self.prefill, source, ToDecode(None)))
            self._sequential[name] = target
            return
        legs = [
            (self.prefill, source, ToDecode(number + 1)),
            (self.decode, target, self._address(number + 1)),
        ]
        self.random.shuffle(legs)
        self._coming += legs

    def _address(self, room: int, is_computed: bool = False) -> FromPrefill:
        return Registries(room, "host", 1, len(self._addresses), is_computed, self._addresses)

    def _turn(self) -> None:
        chance = self.random.random()
        if chance < 0.25 and self._coming:
            engine, request, params = self._coming.pop(
                self.random.randrange(min(3, len(self._coming)))
            )
            engine.add(request, params)
        elif 0.25 <= chance < 0.25 + self.aborts:
            engine = self.random.choice((self.prefill, self.decode))
            if engine.requests:
                engine.abort(self.random.choice(list(engine.requests)))
        elif 0.30 <= chance < 0.36:
            gate = self.random.choice(self._gates)
            gate.open.clear() if self.random.random() < 0.6 else gate.open.set()
        elif 0.36 <= chance < 0.44:
            self._wake.clear()
            self._wake.wait(0.01)
        else:
            self._step(self.random.choice((self.prefill, self.decode)))
        self._answer()

    def _step(self, engine: Engine) -> None:
        """Plan, run or process; up to two steps are under way."""
        calls = [engine.execute, engine.process]
        self.random.shuffle(calls)
        if len(engine.steps) < 2 and self.random.random() < 0.6:
            if isinstance(engine, PrefillEngine):
                # A run without one would show nothing of it.
                often = 0.2 if engine.preemptions else 1.0
                engine.schedule(
                    self.random.randint(1, 9), self.preempts and self.random.random() < often
                )
            else:
                assert isinstance(engine, DecodeEngine)
                engine.schedule()
        any(call() for call in calls)
        self._check_free()

    def _answer(self) -> None:
        for name in self._sequential.keys() & self.prefill.ended.keys():
            target = self._sequential.pop(name)
            if (answer := self.prefill.answers.get(name)) is not None:
                self.decode.add(target, self._address(answer[ROOM], is_computed=True))

    def _check_free(self) -> None:
        """I2, except that a preemption frees what may be read until its step runs."""
        for engine in (self.decode,) if self.preempts else (self.prefill, self.decode):
            free = [
                base + block.block_id
                for block in engine.pool.free
                for base in engine.workers[0].thread.pool.layout.bases
            ]
            for worker in engine.workers:
                busy = worker.thread.pages.busy(free)
                assert not busy.size, (
                    f"blocks {busy} of {type(worker).__name__} are free and in use"
                )

    def _is_over(self) -> bool:
        engines = (self.prefill, self.decode)
        return not (
            self._coming
            or self._sequential
            or any(
                engine.requests or any(worker.is_busy for worker in engine.workers)
                for engine in engines
            )
            or self.decode.scheduler.quarantined_blocks
        )

    def _check_rest(self) -> None:
        for engine in (self.prefill, self.decode):
            assert len(engine.pool.free) == len(engine.pool.blocks) - 1
            assert not engine._remaining, "some workers told of what others did not"
            assert all(worker.thread.pages.at_rest() for worker in engine.workers)
        assert not (self.decode.scheduler._loads or self.decode.scheduler._quarantine)
        prefill = self.prefill.scheduler
        assert not (prefill._rooms or prefill._streaming or prefill._places or prefill._taken)
        assert len(self.prefill.ended) == REQUESTS


@contextmanager
def game(
    seed: int,
    *,
    workers: int = 1,
    recomputes: bool = False,
    preempts: bool = False,
    pages: int = PAGES,
    groups: Groups = ONE_GROUP,
    is_staged: bool = False,
    source_deadline_s: float = 0.1,
    load_deadline_s: float | None = 0.05,
) -> Iterator[Game]:
    timing = Timing(rendezvous_s=source_deadline_s, announced_s=source_deadline_s)
    wake, gates = threading.Event(), [Gate() for _ in range(workers)]
    with ExitStack() as stack:
        sources = [
            new_prefill(
                rank, gate, wake, timing, source_deadline_s, pool_of(groups), is_staged=is_staged
            )
            for rank, gate in enumerate(gates)
        ]
        targets = [
            new_decode(rank, wake, timing, load_deadline_s, pool_of(groups), is_staged=is_staged)
            for rank in range(workers)
        ]
        sides: list[PrefillWorker | DecodeWorker] = [*sources, *targets]
        for side in sides:
            side.start()
            stack.callback(side.close)
        for gate in gates:
            stack.callback(gate.open.set)
        found = Game(
            seed,
            PrefillEngine(PrefillScheduler(groups, {}), sources, groups, pages),
            DecodeEngine(
                DecodeScheduler(groups, workers), targets, groups, pages, recomputes=recomputes
            ),
            gates,
            wake,
        )
        found.preempts = preempts
        yield found


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    "cache",
    [
        {"workers": 1},
        {"workers": 2},
        {"groups": Groups([FULL._replace(number=1), WINDOW])},
        {"groups": MANY_GROUPS},
        {"groups": MANY_GROUPS, "is_staged": True},
    ],
    ids=["one worker", "two workers", "window", "states", "staged states"],
)
def test_vllms_rules_are_kept(
    cache: dict[str, Any],
    recomputes: bool,
    preempts: bool,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_worker, "_PREEMPTION_S", 0.005)
    with game(pytestconfig.option.seed, recomputes=recomputes, preempts=preempts, **cache) as found:
        found.play()
        if preempts:
            assert found.prefill.preemptions


@contextmanager
def tight(seed: int, **more: Any) -> Iterator[Game]:
    """All come at once, in any order, and no deadline cuts off a wait."""
    with game(
        seed,
        pages=more.pop("pages", TIGHT),
        source_deadline_s=2 * PATIENCE_S,
        load_deadline_s=None,
        **more,
    ) as found:
        found.crowds, found.aborts = True, 0.002
        yield found


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_two_requests_wait_for_each_other(
    workers: int, preempts: bool, pytestconfig: pytest.Config
) -> None:
    with tight(pytestconfig.option.seed, workers=workers, preempts=preempts) as found:
        found.play()


@pytest.mark.parametrize("preempts", [False, True])
def test_no_two_requests_wait_for_each_other_in_several_groups(
    preempts: bool, pytestconfig: pytest.Config
) -> None:
    pages = 2 + MANY_GROUPS.most_blocks(5 * PAGE_SIZE)
    with tight(
        pytestconfig.option.seed, groups=MANY_GROUPS, pages=pages, preempts=preempts
    ) as found:
        found.play()


def _decode_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    new_request = DecodeScheduler.new_request
    patch.setattr(
        DecodeScheduler,
        "new_request",
        lambda self, request, params: new_request(
            self, request, msgspec.structs.replace(params, is_computed=True)
        ),
    )


def _prefill_begins_more_than_it_has_blocks_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillScheduler, "may_begin", lambda self, request: True)


def _prefill_tells_before_it_has_begun(patch: pytest.MonkeyPatch) -> None:
    begun = PrefillThreadRoom.begin
    opened = PrefillWorker._open

    def opens(self: PrefillWorker, what: Any) -> None:
        opened(self, what)
        source = self._sources.get(what.request)
        if source is not None and source.room is not None:
            begun(source.room)

    patch.setattr(PrefillWorker, "_open", opens)


def _prefill_computes_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill_scheduler, "_end_before_last_token", lambda request: None)


def _a_window_that_is_too_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Space,
        "wanted",
        lambda self, tokens, prefix=0: max(
            0, WANTED(self, tokens, prefix) - bool(self.window and tokens > self.window)
        ),
    )


WANTED = Space.wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [_prefill_computes_the_last_token, _a_window_that_is_too_small],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_a_plant_that_moves_too_little_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    # vLLM frees a block that leaves the window, which another request may then overwrite or not.
    found_by = "wrong bytes|are free and in use"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=found_by):
        plant(patch)
        for seed in range(20):
            with game(seed, groups=MANY_GROUPS) as found:
                found.patience_s = 2.0
                found.play()


PLANTS = [
    _decode_does_not_wait,
    _prefill_begins_more_than_it_has_blocks_for,
    _prefill_tells_before_it_has_begun,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_plant_that_lets_them_wait_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match=NO_END):
        plant(patch)
        for seed in range(40):
            with tight(seed, preempts=True) as found:
                found.patience_s = 2.0
                found.play()
