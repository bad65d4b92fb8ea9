"""Both sides of the connector, in scheduler and workers, against vLLM's rules: random arrivals, aborts, preemptions,
frozen writers and deadlines over real nodes. What a run meets depends on its seed and on the machine's clock."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from typing import Any

import pytest

import kvflow
from kvflow.connectors.vllm import prefill_worker
from kvflow.connectors.vllm.decode_scheduler import DecodeScheduler
from kvflow.connectors.vllm.decode_worker import DecodeWorker
from kvflow.connectors.vllm.params import ROOM, FromPrefill, ToDecode
from kvflow.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvflow.connectors.vllm.prefill_worker import PrefillWorker
from kvflow.connectors.vllm.transfers import Transfers
from kvflow.protocols.limits import Timing
from tests.connectors.vllm.vllm_rules import DecodeEngine, Engine, PrefillEngine, Request
from tests.connectors.vllm.worker_pair import PAGE_SIZE, Gate, GatedPlane, new_pool

REQUESTS, PATIENCE_S = 25, 20.0
TIMING = Timing(rendezvous_s=0.1)


class Registries(FromPrefill, frozen=True):
    """Prefill's workers where they are, instead of behind ports that follow each other."""

    addresses: tuple[str, ...] = ()

    def registry(self, rank: int) -> str:
        return self.addresses[rank]


class Game:
    """One run: `play` to the end of all requests, or to an assertion."""

    def __init__(self, seed: int, prefill: PrefillEngine, decode: DecodeEngine, gates: list[Gate], wake: Any) -> None:
        self.random = random.Random(seed)
        self.prefill, self.decode, self._gates, self._wake = prefill, decode, gates, wake
        self._addresses = tuple(worker.thread.registry for worker in prefill.workers)
        self._coming: list[tuple[Engine, Request, Any]] = []  # legs that their proxy has not posted yet
        self._sequential: dict[str, Request] = {}  # decode's legs, while prefill computes
        self.preempts = False

    def play(self) -> None:
        for number in range(REQUESTS):
            self._arrive(number)
        while self._coming or self._sequential:
            self._turn()
        for gate in self._gates:
            gate.open.set()
        deadline = monotonic() + PATIENCE_S
        while not self._is_over():
            assert monotonic() < deadline, f"no end within {PATIENCE_S:g} s: {self.prefill.ended} {self.decode.ended}"
            self._wake.clear()
            for engine in (self.prefill, self.decode):
                self._step(engine)
            self._answer()
            self._wake.wait(0.002)
        self._check_rest()

    def _arrive(self, number: int) -> None:
        tokens, name = self.random.randint(1, 5 * PAGE_SIZE), f"request {number}"
        source, target = Request(name, tokens, number), Request(name, tokens, number)
        target.hit = self.random.choice((0, 0, self.random.randint(0, (tokens - 1) // PAGE_SIZE)))
        target.steps_left = self.random.randint(1, 3)
        if self.random.random() < 0.5:
            self._coming.append((self.prefill, source, ToDecode(None)))
            self._sequential[name] = target
            return
        legs = [(self.prefill, source, ToDecode(number + 1)), (self.decode, target, self._address(number + 1))]
        self.random.shuffle(legs)
        self._coming += legs

    def _address(self, room: int) -> FromPrefill:
        return Registries(room, "host", 1, len(self._addresses), self._addresses)

    def _turn(self) -> None:
        chance = self.random.random()
        if chance < 0.25 and self._coming:
            engine, request, params = self._coming.pop(self.random.randrange(min(3, len(self._coming))))
            engine.add(request, params)
        elif chance < 0.30:
            engine = self.random.choice((self.prefill, self.decode))
            if engine.requests:
                engine.abort(self.random.choice(list(engine.requests)))
        elif chance < 0.36:
            gate = self.random.choice(self._gates)
            gate.open.clear() if self.random.random() < 0.6 else gate.open.set()
        elif chance < 0.44:
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
                engine.schedule(self.random.randint(1, 9), self.preempts and self.random.random() < 0.2)
            else:
                assert isinstance(engine, DecodeEngine)
                engine.schedule()
        any(call() for call in calls)
        self._check_free()

    def _answer(self) -> None:
        """Of prefill, to a proxy that posts the second leg then."""
        for name in self._sequential.keys() & self.prefill.ended.keys():
            target = self._sequential.pop(name)
            if (answer := self.prefill.answers.get(name)) is not None:
                self.decode.add(target, self._address(answer[ROOM]))

    def _check_free(self) -> None:
        """I2: nobody writes into what may be used again. A preemption frees what may be read until its step runs."""
        for engine in (self.decode,) if self.preempts else (self.prefill, self.decode):
            free = [block.block_id for block in engine.pool.free]
            for worker in engine.workers:
                busy = worker.thread.pages.busy(free)
                assert not busy.size, f"blocks {busy} of {type(worker).__name__} are free and in use"

    def _is_over(self) -> bool:
        engines = (self.prefill, self.decode)
        return not (
            any(engine.requests or any(worker.is_busy for worker in engine.workers) for engine in engines)
            or self.decode.scheduler.quarantined_blocks
        )

    def _check_rest(self) -> None:
        for engine in (self.prefill, self.decode):
            assert len(engine.pool.free) == len(engine.pool.blocks)
            assert not engine._remaining, "some workers told of what others did not"
            assert all(worker.thread.pages.at_rest() for worker in engine.workers)
        assert not (self.decode.scheduler._loads or self.decode.scheduler._quarantine)
        assert not (self.prefill.scheduler._rooms or self.prefill.scheduler._streaming)
        assert len(self.prefill.ended) == REQUESTS


@contextmanager
def game(seed: int, *, workers: int, recomputes: bool, preempts: bool) -> Iterator[Game]:
    wake, gates = threading.Event(), [Gate() for _ in range(workers)]
    with ExitStack() as stack:
        sources: list[PrefillWorker] = []
        targets: list[DecodeWorker] = []
        for rank, gate in enumerate(gates):
            prefill = kvflow.PrefillThread(new_pool(1), GatedPlane(gate), registry_port=0, timing=TIMING)
            source = PrefillWorker(prefill, Transfers(64, f"0.{rank}"), wake.set, source_deadline_s=0.1)
            source.start()
            stack.callback(source.close)
            sources.append(source)
        for rank in range(workers):
            decode = kvflow.DecodeThread(new_pool(), "local", resolve=kvflow.RegistryClient().resolve, timing=TIMING)
            stats = Transfers(64, f"0.{rank}")
            target = DecodeWorker(decode, stats, wake.set, rank=rank, load_deadline_s=0.05)
            target.start()
            stack.callback(target.close)
            targets.append(target)
        for gate in gates:
            stack.callback(gate.open.set)
        found = Game(
            seed,
            PrefillEngine(PrefillScheduler(PAGE_SIZE, {}), sources),
            DecodeEngine(DecodeScheduler(PAGE_SIZE, workers), targets, recomputes=recomputes),
            gates,
            wake,
        )
        found.preempts = preempts
        yield found


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_vllms_rules_are_kept(
    workers: int, recomputes: bool, preempts: bool, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_worker, "_PREEMPTION_S", 0.005)
    seed = pytestconfig.option.seed
    with game(seed, workers=workers, recomputes=recomputes, preempts=preempts) as found:
        found.play()
        if preempts:
            assert found.prefill.preemptions
