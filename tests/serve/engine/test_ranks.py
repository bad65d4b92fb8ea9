"""Two stages of one model over real sockets, nodes and rooms: steps, and how requests end."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvflow.handlers.group import GroupRequest
from kvflow.protocols.cache.hashes import ANY
from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    KvflowError,
    LostError,
    MisuseError,
    RefusedError,
    WireError,
)
from kvflow.protocols.wire.messages import Incarnation, Rank
from kvflow.serve.engine.model.grammars import Grammar, Grammars
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.group import PrefillGroup, _Asked
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.transports.control.zmq import connect_dealer
from tests.fakes.written import END, byte_tokenizer
from tests.serve.engine.pair import Watched, greedy, prompt_of, until
from tests.serve.engine.stages import PAGE_SIZE, PAGES, Grouped, group
from tests.serve.engine.tiny_models import Expected


async def test_stages_compute_in_lockstep_what_one_rank_does(
    grouped: Grouped, expected: Expected
) -> None:
    prompts = [prompt_of(n, n) for n in (1, 3, 17, 40, 64)]
    async with grouped(chunk_tokens=8, max_batch_tokens=20) as ranks:
        found = await asyncio.gather(*(ranks.tokens(prompt, greedy(4)) for prompt in prompts))
        assert not ranks.broken
    assert found == [expected(prompt) for prompt in prompts]


class Compiling:
    """Two stages and a decode with grammars; the last stage compiles them when `go` is set."""

    def __init__(self, stages: list[LoadedModel], whole: LoadedModel) -> None:
        self.tokenizer = byte_tokenizer()
        self.stages, self.whole = [replace(stage) for stage in stages], replace(whole)
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.error: KvflowError | None = None
        end = frozenset({self.tokenizer.get_vocab()[END]})
        for model in (*self.stages, self.whole):
            vars(model)["grammars"] = Grammars(self.tokenizer, whole.vocab_size, end)
        grammars: Any = self.stages[-1].grammars
        self._compile, grammars.compile = grammars.compile, self.held

    async def held(self, grammar: Grammar | None) -> None:
        self.begun.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        await self._compile(grammar)

    def close(self) -> None:
        for model in (*self.stages, self.whole):
            model.grammars.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_other_requests_go_on_while_a_rank_compiles_a_grammar(
    stages: list[LoadedModel], llama: LoadedModel, expected: Expected, fails: bool
) -> None:
    with contextlib.closing(Compiling(stages, llama)) as held:
        async with group(held.stages, held.whole, chunk_tokens=8) as ranks:
            params = greedy(3, grammar=Grammar("regex", "[ab]{3}"))
            limited = asyncio.create_task(ranks.tokens(prompt_of(20), params))
            await asyncio.wait_for(held.begun.wait(), 20)
            for length in (17, 40):
                found = await asyncio.wait_for(ranks.tokens(prompt_of(length), greedy(4)), 60)
                assert found == expected(prompt_of(length))
            assert ranks.group.running == 1 and not limited.done()
            held.error = MisuseError("regex cannot be compiled now") if fails else None
            held.go.set()
            if fails:
                with pytest.raises(KvflowError, match="regex cannot be compiled now"):
                    await limited
            else:
                text = str(held.tokenizer.decode(await limited))
                assert re.fullmatch("[ab]{3}", text), text
            assert not ranks.broken


async def test_a_rank_that_ends_waits_for_no_grammar(
    stages: list[LoadedModel], llama: LoadedModel
) -> None:
    with contextlib.closing(Compiling(stages, llama)) as held:
        async with group(held.stages, held.whole, drops_frames=True) as ranks:
            params = greedy(3, grammar=Grammar("regex", "[ab]{3}"))
            limited = asyncio.create_task(ranks.tokens(prompt_of(20), params))
            await asyncio.wait_for(held.begun.wait(), 20)
            await asyncio.wait_for(ranks.replace_second(), 60)
            with pytest.raises(KvflowError):
                await limited


async def test_a_step_that_fails_at_one_rank_fails_what_runs_and_no_more(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(chunk_tokens=4, max_batch_tokens=4) as ranks:
        steps = Watched(ranks.follower.steps.runner)
        steps.before = lambda: 1 // (len(steps.steps) - 1)
        legs = [asyncio.create_task(ranks.tokens(prompt_of(40, n), greedy(2))) for n in range(3)]
        for leg in legs:
            with pytest.raises(RefusedError, match="prefill step failed: ZeroDivisionError"):
                await leg
        await ranks.rest()
        assert ranks.broken == ["engine_error: prefill step failed: ZeroDivisionError"]
        assert await ranks.tokens(prompt_of(40), greedy(4)) == expected(prompt_of(40))


async def test_a_request_that_cannot_start_ends_and_the_next_one_starts(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with grouped() as ranks:
        with monkeypatch.context() as patched:
            patched.setattr(ranks.steps, "keep", lambda ticket: 1 // 0)
            with pytest.raises(
                RefusedError, match="starting the request failed: ZeroDivisionError"
            ):
                await asyncio.wait_for(ranks.tokens(prompt_of(9), greedy(2)), 10)
        await ranks.rest()
        assert len(await asyncio.wait_for(ranks.tokens(prompt_of(9), greedy(2)), 10)) == 2


async def test_clients_that_leave_take_their_requests_along(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(chunk_tokens=4, max_batch_tokens=12) as ranks:
        alone = ranks.prefill(next(ranks.rooms), prompt_of(20), greedy(1))
        await until(lambda: len(ranks.follower.requests) == 1)
        alone.cancel()
        await asyncio.wait([alone])
        legs = [asyncio.create_task(ranks.tokens(prompt_of(40, n), greedy(4))) for n in range(8)]
        await until(lambda: ranks.steps._step > 6)
        for leg in legs[::2]:
            leg.cancel()
        await asyncio.wait(legs)
        for number, leg in enumerate(legs):
            if not number % 2:
                assert leg.cancelled()
            else:
                assert leg.result() == expected(prompt_of(40, number))
        assert not ranks.broken


async def test_what_a_rank_must_not_say_changes_nothing(grouped: Grouped) -> None:
    async with grouped(drops_frames=True) as ranks:
        stranger = connect_dealer(ranks.steps_address, 77)
        info = ranks.follower._hello.info
        rank_of = {Incarnation(2): Rank(1), Incarnation(77): Rank(9)}
        hellos = [
            wire.Hello(member=member, rank=rank, pages=1, rows=0, info=info)
            for member, rank in rank_of.items()
        ]
        failed = wire.StepFailed(generation=1, cause=Cause(Code.ENGINE_ERROR))
        for frame in (b"", b"\xc1", *map(wire.encode, (*hellos, failed))):
            stranger.send(frame)
        await until(lambda: ranks.steps.dropped == 5)
        stranger.close()
        assert ranks.steps.ready and not ranks.broken
        ranks.follower._receive(wire.Drop(ticket=5))  # it overtakes the request's opening
        await until(lambda: ranks.follower._dropped_ahead == {5})
        with pytest.raises(CapacityError, match="prompt tokens in the KV pool"):
            await ranks.prefill(1, prompt_of(PAGES * PAGE_SIZE + 1), greedy(1))


def test_requests_of_a_group_are_checked_where_they_arrive() -> None:
    params = SamplingParams(logit_bias=((1, 2.0),))
    good = wire.GroupPrompt(ids=b"\x01\0\0\0", digest=bytes(32), params=params, deadline_s=1)
    assert wire.parse_prompt(wire.encode(good)) == good
    with pytest.raises(WireError):
        wire.parse_prompt(b"")
    for wrong in ({"ids": b""}, {"ids": bytes(5)}, {"digest": b"short"}, {"deadline_s": -1}):
        with pytest.raises(WireError):
            wire.parse_prompt(wire.encode(msgspec.structs.replace(good, **wrong)))
    broken = msgspec.msgpack.decode(wire.encode(good))
    broken[3]["temperature"] = -1.0
    with pytest.raises(MisuseError, match="temperature"):
        wire.parse_prompt(wire.encode(broken))
    row = wire.PlannedRow(1, 0, 1, 0)
    for generation, rows in ((1, ()), (0, (row,))):
        plan = wire.Plan(generation=generation, step=1, rows=rows)
        with pytest.raises(WireError):
            wire.parse_at_others(wire.encode(plan))


async def test_a_group_that_was_not_started_can_be_closed() -> None:
    nothing: Any = None
    await PrefillGroup(nothing, nothing, nothing, nothing).close()


async def test_closing_ends_every_request_and_waits_for_them(
    grouped: Grouped, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, decided = asyncio.Event(), GroupRequest.decided

    async def slowly(request: GroupRequest) -> None:
        try:
            await decided(request)
        finally:
            await gate.wait()

    monkeypatch.setattr(GroupRequest, "decided", slowly)
    async with grouped() as ranks:
        legs = [ranks.prefill(next(ranks.rooms), prompt_of(n), greedy(1)) for n in (9, 20)]
        await until(lambda: len(ranks.follower.requests) == 2)
        closing = asyncio.create_task(ranks.group.close())
        for _ in range(50):
            await asyncio.sleep(0)
        assert not closing.done() and ranks.group.running == 2
        gate.set()
        await closing
        assert ranks.group.running == 0
        for leg in legs:
            with pytest.raises(KvflowError, match="the prefill is shutting down"):
                await leg
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert not {"kvflow-group-start", "kvflow-group-1", "kvflow-group-2"} & names


class LoneGroup:
    """A group at the first rank with one request, whose engine the test controls."""

    def __init__(self) -> None:
        self.agreed: list[Any] = []
        self.closed: list[Cause] = []
        self.computing: Any = SimpleNamespace(
            first=asyncio.get_running_loop().create_future(), early_token=None
        )
        engine: Any = SimpleNamespace(
            expect=lambda *_: self.computing,
            may_begin=lambda request: None,
            agreed=lambda *given: self.agreed.append(given),
        )
        nothing: Any = None
        self.group = PrefillGroup(nothing, nothing, engine, nothing)
        self.asked = self.group._asked[1] = _Asked(nothing, [1], SamplingParams(), ANY, {0, 1})

    async def opened(self, first: TokenOut | KvflowError | None) -> None:
        room: Any = SimpleNamespace(close=self.closed.append)
        self.group.opened(1, room)
        if isinstance(first, KvflowError):
            self.computing.first.set_exception(first)
        else:
            self.computing.first.set_result(first)
        await asyncio.sleep(0)


async def test_the_token_that_the_first_rank_chooses_is_the_groups() -> None:
    token = TokenOut(5)
    lone = LoneGroup()
    await lone.opened(token)
    assert lone.computing.early_token == token and not lone.asked.token.done()
    lone = LoneGroup()
    lone.asked.started = True
    await lone.opened(token)
    assert lone.asked.token.result() == token and not lone.closed


async def test_a_room_that_ends_before_its_token_gives_none() -> None:
    lone = LoneGroup()
    lone.asked.started = True
    await lone.opened(None)
    assert not lone.asked.token.done() and not lone.closed
    lone = LoneGroup()
    await lone.opened(LostError("decode is gone"))
    assert list(map(str, lone.closed)) == ["peer_lost: decode is gone"]


async def test_what_others_say_of_a_request_before_it_is_open_here_is_dropped() -> None:
    lone, token = LoneGroup(), TokenOut(5)
    for ticket in (1, 2):
        lone.group.first_token(ticket, token)
        lone.group.agreed(ticket, 4)
    assert not lone.agreed and not lone.asked.token.done()
    lone.group.opened(1, lone.asked.group)  # type: ignore[arg-type]
    lone.group.agreed(1, 4)
    assert lone.agreed == [(lone.computing, 4)]
