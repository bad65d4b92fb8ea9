"""Retracted requests return with the tokens of a pool that is never full."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvflow.memory.copies import HostCopier
from kvflow.memory.residency import Resident
from kvflow.node.handoff import HandOff
from kvflow.node.packed_array import PackedArray
from kvflow.protocols.errors import AbortedError, CapacityError, HostMemoryError, KvflowError
from kvflow.protocols.machines.residency import ResidencyPhase
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.budget import DECAY_STEPS, LEAST_SHARE, NewTokenRatio
from kvflow.serve.engine.scheduler.burst import DecodeRequest
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.retraction import Retractions
from kvflow.serve.launch.logs import RequestFields
from kvflow.telemetry.requests import CURRENT, RequestTrace
from tests.memory.gate import CopyGate
from tests.serve.engine.pair import EnginePair, greedy, prompt_of, tokens_of, until
from tests.serve.engine.tiny_models import Generated, Loaded

SMALL = {"page_size": 4, "num_pages": 24, "source_pages": 512, "new_token_ratio": 0.2}
PROMPTS = [prompt_of(8 + n, n) for n in range(12)]  # each needs 10 to 13 pages in the end
NEW_TOKENS = 32
HOST: dict[str, dict[str, int]] = {
    "snapshots": {"host_pages": 200},
    "little": {"host_pages": 12},
    "none": {},
}


@pytest.fixture
def want(generated: Generated) -> list[list[int]]:
    return [generated("llama", prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("host", HOST)
async def test_a_small_pool_gives_the_same_tokens(
    llama: LoadedModel, host: str, want: list[list[int]]
) -> None:
    async with EnginePair(llama, **SMALL, **HOST[host]) as pair:
        assert await pair.tokens_of_all(PROMPTS, greedy(NEW_TOKENS)) == want
        report = pair.decode.retraction
        assert report.retracts > 0 and report.resumes + report.recomputes == report.retracts
        assert bool(report.resumes) == (host != "none")
        assert bool(report.recomputes) == (host != "snapshots")
        await until(lambda: pair.home)
        assert (report.retracted_now, report.host_bytes_used) == (0, 0)


@pytest.mark.parametrize(
    ("host", "said"),
    [("little", "tokens of host memory"), ("none", "(--host-memory-bytes), of which 0 are free")],
)
async def test_without_enough_host_memory_and_recomputation_the_reason_is_told(
    llama: LoadedModel, host: str, said: str, want: list[list[int]]
) -> None:
    async with EnginePair(llama, **SMALL, **HOST[host], recompute=False) as pair:
        runs = (pair.tokens(p, greedy(NEW_TOKENS)) for p in PROMPTS)
        found = await asyncio.gather(*runs, return_exceptions=True)
        failed = [f for f in found if isinstance(f, BaseException)]
        assert failed and all(isinstance(f, HostMemoryError) and said in str(f) for f in failed)
        assert all(f == w for f, w in zip(found, want, strict=True) if f not in failed)
        assert pair.decode.retraction.recomputes == 0


async def test_nobody_else_leaves_while_pages_that_are_enough_are_copied_out(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EnginePair(llama, **SMALL, host_pages=200) as pair:
        gate = CopyGate(monkeypatch)
        running = asyncio.create_task(pair.tokens_of_all(PROMPTS[:3], greedy(NEW_TOKENS)))
        await gate.reached()
        looks, look = 0, pair.decode._next_batch

        def looked() -> Any:
            nonlocal looks
            looks += 1
            return look()

        monkeypatch.setattr(pair.decode, "_next_batch", looked)

        def looks_again() -> bool:
            pair.decode._wake.set()
            return looks > 10 and bool(pair.decode._growth.short)

        await until(looks_again)
        assert pair.decode.retraction.retracts == 1
        gate.go.set()
        await running


@pytest.mark.parametrize("host", HOST)
async def test_the_log_tells_of_a_short_pool_once_and_of_each_request_at_debug_level(
    llama: LoadedModel,
    host: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvflow.serve.engine.scheduler.retraction.REPORT_EVERY_S", 1e9)
    caplog.set_level(logging.DEBUG, "kvflow.serve.engine")
    caplog.handler.addFilter(names := RequestFields())

    async def named(pair: EnginePair, number: int) -> None:
        CURRENT.set(RequestTrace(f"client {number}"))
        await pair.tokens(PROMPTS[number], greedy(NEW_TOKENS))

    try:
        async with EnginePair(llama, **SMALL, **HOST[host]) as pair:
            await asyncio.gather(*(named(pair, n) for n in range(len(PROMPTS))))
            report = pair.decode.retraction
            # Nothing is kept of those that have ended.
            await until(lambda: not pair.decode._retractions._moves)
    finally:
        caplog.handler.removeFilter(names)
    shortages = [r for r in caplog.records if r.levelno == logging.INFO]
    assert (
        len(shortages) == 1 and "short of pages: 1 requests retracted" in shortages[0].getMessage()
    )
    for word in ("retracted", "resumed"):
        lines = [
            r
            for r in caplog.records
            if r.levelno == logging.DEBUG and r.getMessage().startswith(word)
        ]
        assert len(lines) == report.retracts > 0
        assert all(r.__dict__["request_id"].startswith("client ") for r in lines)


SAMPLED = SamplingParams(
    temperature=0.9,
    top_k=20,
    seed=5,
    max_new_tokens=NEW_TOKENS,
    ignore_eos=True,
    frequency_penalty=0.4,
    logprobs=2,
)


async def answers(
    pair: EnginePair, prompts: list[list[int]], params: SamplingParams, steps: set[int]
) -> list[list[int]]:
    """Decode in one batch; retract all after each of `steps` (0: before the first one)."""
    engine, loop = pair.decode, asyncio.get_running_loop()

    def begin() -> None:
        honest, done = engine._runner.forward, itertools.count(1)
        if 0 in steps:
            engine.retract_all()

        def forward(rows: list[Row]) -> torch.Tensor:
            found = honest(rows)
            if next(done) in steps:
                told = threading.Event()
                loop.call_soon_threadsafe(engine.retract_all)
                loop.call_soon_threadsafe(told.set)
                assert told.wait(20)
            return found

        engine._runner.forward = forward  # type: ignore[method-assign]

    found = await pair.together(prompts, params, begin)
    return [[out.token_id for out in outs] for outs in found]


@pytest.mark.parametrize(
    "params", [greedy(NEW_TOKENS), SAMPLED], ids=["greedy", "sampled with penalties"]
)
@pytest.mark.parametrize("steps", [{0}, {9}, {0, 9, 10, 25}], ids=str)
@pytest.mark.parametrize("host", ["snapshots", "none"])
async def test_everybody_is_retracted_in_mid_decode(
    llama: LoadedModel, host: str, steps: set[int], params: SamplingParams
) -> None:
    async with EnginePair(llama, page_size=4) as roomy:
        want = await answers(roomy, PROMPTS[:4], params, set())
    async with EnginePair(llama, page_size=4, **HOST[host]) as pair:
        assert await answers(pair, PROMPTS[:4], params, steps) == want
        assert pair.decode.retraction.retracts >= 4


@pytest.mark.parametrize("family", ["llama", "jamba"])
async def test_a_long_prompt_is_computed_again_as_it_was_at_first(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("kvflow.serve.engine.scheduler.burst.RECOMPUTED_PER_STEP", 16)
    model, params, prompts = loaded(family), greedy(12), [prompt_of(n, n) for n in (100, 41, 9)]
    async with EnginePair(model, page_size=4) as roomy:
        want = await answers(roomy, prompts, params, set())
    async with EnginePair(model, page_size=4) as pair:
        assert await answers(pair, prompts, params, {3}) == want
        assert pair.decode.retraction.recomputes == 3


async def test_a_closed_engine_copies_no_more(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EnginePair(llama, page_size=4, host_pages=64) as pair:
        stream, _ = await pair.begun(PROMPTS[0], greedy(NEW_TOKENS))
        gate = CopyGate(monkeypatch)
        pair.decode.retract_all()
        await gate.reached()
        closing = asyncio.ensure_future(pair.decode.close())
        await until(lambda: pair.decode._task is not None and pair.decode._task.done())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done(), "a copy still reads the pool (I12)"
        gate.go.set()
        await closing
        with pytest.raises(AbortedError):
            await tokens_of(stream)


@pytest.mark.parametrize(
    "phase", [ResidencyPhase.LEAVING, ResidencyPhase.AWAY, ResidencyPhase.RETURNING]
)
@pytest.mark.parametrize("how", ["abort", "engine closed"])
async def test_a_request_ends_while_it_is_away(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, phase: ResidencyPhase, how: str
) -> None:
    residents: list[Resident] = []
    real = Resident.__init__

    def noted(self: Resident, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        residents.append(self)

    monkeypatch.setattr(Resident, "__init__", noted)
    async with EnginePair(llama, page_size=4, num_pages=16, host_pages=64) as pair:
        stream = pair.stream(PROMPTS[0], greedy(NEW_TOKENS))
        for _ in range(6):
            await anext(stream)
        gate = CopyGate(monkeypatch)
        if phase is ResidencyPhase.AWAY:
            pair.decode._budget._most = 0  # nothing is admitted again
        pair.decode.retract_all()
        await gate.reached()
        if phase is not ResidencyPhase.LEAVING:
            gate.go.set()
        if phase is ResidencyPhase.RETURNING:
            gate.go.clear()
        await until(lambda: residents[0].phase is phase)
        closing = asyncio.ensure_future(stream.aclose() if how == "abort" else pair.decode.close())
        await asyncio.sleep(0)
        gate.go.set()
        await closing
        if how != "abort":
            with pytest.raises(AbortedError):
                await tokens_of(stream)
        await until(lambda: pair.home)
        assert residents[0].phase is ResidencyPhase.ENDED


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
async def test_aborts_at_random_in_a_small_pool(
    llama: LoadedModel, seed: int, want: list[list[int]]
) -> None:
    print("seed", seed)
    dice = random.Random(seed)
    async with EnginePair(llama, **SMALL, host_pages=20) as pair:

        async def one(n: int, leaves_after: int) -> list[int]:
            async with aclosing(pair.stream(PROMPTS[n], greedy(NEW_TOKENS))) as stream:
                return [(await anext(stream)).token_id for _ in range(leaves_after)]

        leaving = [
            dice.randrange(1, NEW_TOKENS) if dice.random() < 0.3 else NEW_TOKENS for _ in PROMPTS
        ]
        found = await asyncio.gather(*(one(n, after) for n, after in enumerate(leaving)))
        assert found == [w[:after] for w, after in zip(want, leaving, strict=True)]


def broken(_: object) -> None:
    raise OSError("no")


async def test_a_failed_copy_ends_its_request_alone(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EnginePair(llama, page_size=4, host_pages=64) as pair:
        stream, _ = await pair.begun(PROMPTS[0], greedy(NEW_TOKENS))
        with monkeypatch.context() as patch:
            patch.setattr(HostCopier, "copy", staticmethod(broken))
            pair.decode.retract_all()
            with pytest.raises(KvflowError, match="moving a retracted request failed: OSError"):
                await tokens_of(stream)
        await until(lambda: pair.home)
        assert len(await pair.tokens(PROMPTS[1], greedy(5))) == 5


async def test_a_request_that_nobody_can_make_room_for_is_told(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflow.serve.engine.scheduler.budget.STUCK_S", 0.1)
    async with EnginePair(llama, **SMALL) as pair:
        stream, _ = await pair.begun(PROMPTS[0], greedy(NEW_TOKENS))
        lost = pair.target.pages.take(pair.target.pages.free_pages, "quarantine")
        with pytest.raises(
            CapacityError, match="no running request will free more: asked for 4, limit 0"
        ):
            await tokens_of(stream)
        pair.target.pages.give_back(lost, "quarantine")


async def test_pages_of_a_room_that_has_not_landed_are_waited_for(
    llama: LoadedModel, generated: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ((PROMPTS[0], NEW_TOKENS), (prompt_of(40, 5), 4))
    async with EnginePair(llama, **{**SMALL, "num_pages": 16}) as pair:
        growth, looks = pair.decode._growth, list[int]()
        monkeypatch.setattr(growth._shortage, "left_s", lambda: 0.0)
        honest = growth.fail_stuck

        def fail_stuck(*, may_come: bool) -> None:
            looks.append(len(growth.short))
            honest(may_come=may_come)

        monkeypatch.setattr(growth, "fail_stuck", fail_stuck)
        pair.on_room = lambda room: room.gate.clear() if room.pages.size == 10 else None
        runs = asyncio.gather(*(pair.tokens(p, greedy(n)) for p, n in asked))

        def looks_again() -> bool:
            pair.decode._wake.set()
            return sum(looks) > 3

        await until(looks_again)
        pair.rooms[1].gate.set()
        assert await runs == [generated("llama", p, n) for p, n in asked]


async def test_what_has_failed_or_ended_does_not_wait_for_its_reader(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EnginePair(llama, page_size=4, host_pages=64, max_batch=2) as pair:
        failing, ended = (
            pair.stream(p, greedy(n)) for p, n in zip(PROMPTS, (NEW_TOKENS, 1), strict=False)
        )
        await anext(failing)
        await anext(ended)
        monkeypatch.setattr(HostCopier, "copy", staticmethod(broken))
        pair.decode.retract_all()
        await until(lambda: pair.home)
        assert not pair.decode._budget.admitted
        with pytest.raises(KvflowError, match="moving a retracted request failed: OSError"):
            await tokens_of(failing)
        await ended.aclose()


async def test_who_comes_back_finds_its_pages_taken_and_is_protected(
    llama: LoadedModel, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another owner takes the pages after they were promised."""
    resume, waits = Resident.resume, asyncio.Event()

    async def late(self: Resident) -> bool:
        if not waits.is_set():
            waits.set()
            lost = pair.target.pages.take(pair.target.pages.free_pages, "another owner")
            try:
                return await resume(self)
            finally:
                pair.target.pages.give_back(lost, "another owner")
        return await resume(self)

    monkeypatch.setattr(Resident, "resume", late)
    async with EnginePair(llama, page_size=16, host_pages=64) as pair:
        engine, (stream, first) = pair.decode, await pair.begun(PROMPTS[0], greedy(NEW_TOKENS))
        engine._budget._most = 0  # it stays away for now
        engine.retract_all()
        await until(lambda: engine.retraction.retracted_now == 1)
        engine.pause()
        engine._budget._most = 256
        engine._budget.grant()
        await until(lambda: engine.retraction.resumes == 1)
        (request,) = engine._running.values()
        assert waits.is_set() and request.protected_until == request.generated + 16
        engine.resume()
        assert [first.token_id, *await tokens_of(stream)] == want[0]


async def test_who_leaves(llama: LoadedModel) -> None:
    """Lower priority first, then fewer generated tokens, then the later one; the last one stays."""
    async with EnginePair(llama, page_size=4, num_pages=200) as pair:
        engine = pair.decode
        engine.pause()
        priorities = zip(PROMPTS, (1, 0, 0, 0), strict=False)
        asked = [
            asyncio.ensure_future(pair.tokens(p, greedy(NEW_TOKENS, priority=n)))
            for p, n in priorities
        ]
        await until(lambda: engine.load().running == 4)
        running = sorted(engine._running.values(), key=lambda r: (r.params.priority != 1, r.number))
        for request, generated in zip(running, (2, 9, 5, 5), strict=True):
            request.sequence.length = request.sequence.prompt_length + generated
        order = engine._retractions.victims(running, {running[0]: 10_000})
        assert [r.number for r in order] == [running[n].number for n in (3, 2, 1)]
        last = running[3]
        alone = {last: 2, running[0]: last.resident.sizes[0]}
        assert engine._retractions.victims(running, alone) == [last], "its own lack goes with it"
        running[3].protected_until = 50
        order = engine._retractions.victims(running, {running[0]: 10_000})
        assert [r.number for r in order] == [running[n].number for n in (2, 1, 0)]
        assert engine._retractions.victims(running[:1], {running[0]: 1}) == []
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)


async def test_cached_pages_are_taken_from_nobody_who_is_about_to_come_back(
    llama: LoadedModel,
) -> None:
    released: list[str] = []

    def away(name: str, number: int, *, granted: bool) -> Any:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if granted:
            future.set_result(None)
        pages = np.zeros(3, np.int32)
        return SimpleNamespace(
            resident=SimpleNamespace(
                phase=ResidencyPhase.AWAY, sizes=(2, 0), needs=lambda count: None
            ),
            admission=SimpleNamespace(granted=future, place=number, has=lambda count: None),
            prefix=SimpleNamespace(held=True, pages=pages, release=lambda: released.append(name)),
        )

    async with EnginePair(llama) as pair:
        retractions = pair.decode._retractions
        retractions._away = {2: away("comes", 2, granted=True)}
        assert not retractions.release_cached() and released == []
        retractions._away[1] = away("waits", 1, granted=False)
        assert retractions.release_cached() and released == ["waits"]
        retractions._away.clear()


@pytest.mark.parametrize(
    ("held", "copied", "finds"),
    [(False, False, True), (False, False, False), (True, False, True), (False, True, True)],
)
def test_what_is_computed_again_begins_with_what_the_cache_has_by_then(
    held: bool, copied: bool, finds: bool
) -> None:
    asked: list[Any] = []
    needs: list[int] = []
    covered: list[int] = []
    found = SimpleNamespace(held=finds, pages=np.zeros(3 * finds, np.int32))

    def again(tokens: Any) -> Any:
        asked.append(len(tokens))
        return found

    before = SimpleNamespace(held=held, again=again)
    request: Any = SimpleNamespace(
        prefix=before,
        sequence=SimpleNamespace(tokens=np.arange(30), length=20),
        resident=SimpleNamespace(sizes=(5, 0), copied=copied, needs=needs.append),
        admission=SimpleNamespace(has=covered.append),
    )
    nothing: Any = None
    calls = dict.fromkeys(("back", "failed", "moved"), nothing)
    retractions = Retractions(nothing, nothing, nothing, recompute=True, **calls)
    retractions._look_again(request)
    looks = not held and not copied
    assert asked == [19] * looks, "the last token is always computed"
    assert request.prefix is (found if looks else before)
    assert (needs, covered) == (([2], [3]) if looks and finds else ([], []))


def test_the_ratio_decays_and_is_raised_by_a_retract() -> None:
    ratio = NewTokenRatio(0.5)
    ratio.stepped(DECAY_STEPS // 2)
    assert ratio.now == pytest.approx(0.5 * (1 + LEAST_SHARE) / 2)
    ratio.stepped(10 * DECAY_STEPS)
    assert ratio.now == pytest.approx(0.5 * LEAST_SHARE)
    ratio.retracted(generated=300, limit=1000, running=5)
    assert ratio.now == pytest.approx(0.4)
    ratio.retracted(generated=0, limit=1000, running=1)
    assert ratio.now == pytest.approx(0.4), "a retract never lowers it"
    ratio.rest()
    assert ratio.now == 0.5
    safe = NewTokenRatio()
    safe.stepped(1000)
    assert safe.now == 1.0


async def test_a_handoff_stays_its_requests_own_while_others_come_and_go(
    llama: LoadedModel,
) -> None:
    numbers = iter(range(1000))
    told: dict[int, HandOff] = {}
    requests: list[DecodeRequest] = []
    async with EnginePair(llama, **SMALL, host_pages=200) as pair:
        take_over = pair.decode._take_over

        def with_more(number: int, *given: Any) -> DecodeRequest:
            *before, handoff = given
            hidden = PackedArray.of(torch.full((1, 32), float(next(numbers)), dtype=torch.bfloat16))
            draft = {
                "draft_token_ids": PackedArray.of(np.arange(8)),
                "draft_probabilities": PackedArray.of(np.full(8, 1 / (2 + number), "f4")),
            }
            told[number] = msgspec.structs.replace(handoff, hidden_states=hidden, **draft)
            frame = bytearray(told[number].encode())
            request = take_over(
                number,
                *before,
                HandOff.decode(frame),  # type: ignore[arg-type, call-arg]
            )
            frame[:] = bytes(len(frame))  # where the next one is received
            requests.append(request)
            return request

        pair.decode._take_over = with_more  # type: ignore[method-assign, assignment]
        await pair.tokens_of_all(PROMPTS, greedy(NEW_TOKENS))
        assert pair.decode.retraction.retracts > 0
        assert len(requests) == len(PROMPTS)
        assert all(request.handoff == told[request.number] for request in requests)
        states = {request.handoff and request.handoff.hidden_states for request in requests}
        assert len(states) == len(PROMPTS)
