"""Prompts that several ranks begin before decode's half arrives, in one order on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from kvflow.handlers.group import MemberShell, RankRequest
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError
from kvflow.protocols.group.member import TicketKey
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.scheduler.params import TokenOut
from tests.serve.engine.pair import Watched, greedy, prompt_of, until
from tests.serve.engine.stages import PAGE_SIZE, Grouped, Stages
from tests.serve.engine.tiny_models import Expected

SMALL = 6  # pages of a pool of one prompt of 24 tokens


class Early:
    """One request whose decode comes when the test says so."""

    def __init__(self, ranks: Stages, prompt: list[int]) -> None:
        self.ranks, self.prompt, self.number = ranks, prompt, next(ranks.rooms)
        self.leg: asyncio.Task[TokenOut] = ranks.prefill(self.number, prompt, greedy(1))

    async def opened(self) -> Early:
        await until(lambda: self._ticket in self.ranks.follower.requests)
        await until(lambda: self.ranks.group._asked[self.ticket].computing is not None)
        return self

    @property
    def _ticket(self) -> int | None:
        found = self.ranks.leader.requests.items()
        return next((ticket for ticket, request in found if request.room == self.number), None)

    @property
    def ticket(self) -> int:
        assert self._ticket is not None
        return self._ticket

    @property
    def computed(self) -> tuple[int, int]:
        asked = self.ranks.group._asked[self.ticket]
        followed = self.ranks.follower.requests[self.ticket]
        first = asked.computing.sequence.computed if asked.computing else 0
        return first, followed.request.sequence.computed if followed.request else 0

    @property
    def phases(self) -> list[PrefillPhase]:
        found = [shell.requests.values() for shell in self.ranks.members]
        return [
            request.room.phase
            for requests in found
            for request in requests
            if request.room.room == self.number
        ]

    async def whole(self) -> None:
        await until(lambda: self.computed == (len(self.prompt),) * 2)
        computing = self.ranks.group._asked[self.ticket].computing
        assert computing is not None
        await until(lambda: computing.early_token is not None)

    def meet(self) -> asyncio.Task[list[int]]:
        return asyncio.create_task(self.ranks.decoded(self.number, self.prompt, greedy(4)))

    async def answers(self, expected: Expected) -> None:
        assert await self.meet() == expected(self.prompt)
        assert (await self.leg).token_id == expected(self.prompt)[0]


async def begun(ranks: Stages, tokens: int, salt: int = 0) -> Early:
    return await Early(ranks, prompt_of(tokens, salt)).opened()


async def early_and_whole(ranks: Stages, tokens: int) -> Early:
    early = await begun(ranks, tokens)
    await early.whole()
    return early


async def beside(ranks: Stages, expected: Expected, tokens: int = 24, salt: int = 1) -> None:
    prompt = prompt_of(tokens, salt)
    assert await ranks.tokens(prompt, greedy(4)) == expected(prompt)


def counts(ranks: Stages) -> tuple[int, int, int, int]:
    found = ranks.engine.optimism
    return found.starts, found.hits, found.lost, found.holding_now


async def test_what_is_computed_leaves_every_rank_when_decode_comes(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(chunk_tokens=10, optimistic_tries=1) as ranks:
        early = await early_and_whole(ranks, 27)
        assert (
            counts(ranks) == (1, 0, 0, 1)
            and early.phases == [PrefillPhase.EXPECTED] * 2
            and not early.leg.done()
        )
        load, steps = ranks.engine.load(), ranks.steps._step
        assert (load.running, load.waiting) == (1, 0)
        await early.answers(expected)
        assert counts(ranks) == (1, 1, 0, 0) and ranks.steps._step == steps == 3


async def test_without_tries_nothing_begins_before_decode_comes(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped() as ranks:
        early = await begun(ranks, 27)
        await until(lambda: bool(ranks.follower.requests))
        await beside(ranks, expected, 9, 0)
        assert ranks.steps._step == 1 and ranks.engine.load().waiting == 1
        await early.answers(expected)
        assert counts(ranks) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "pages", [(SMALL, SMALL), (SMALL, 40), (40, SMALL)], ids=["equal", "first", "second"]
)
async def test_every_rank_gives_places_back_for_whoever_has_both_halves(
    pages: tuple[int, int], grouped: Grouped, expected: Expected
) -> None:
    async with grouped(pages=pages, chunk_tokens=10, optimistic_tries=2) as ranks:
        early = await early_and_whole(ranks, 24)
        await beside(ranks, expected)
        await until(lambda: counts(ranks) == (2, 0, 1, 1))
        await early.whole()
        await early.answers(expected)
        assert counts(ranks) == (2, 1, 1, 0)


async def test_a_prompt_that_shares_cached_pages_gives_way_to_whom_no_page_is_missing_here(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(pages=(10, 10), caches=True, chunk_tokens=10, optimistic_tries=2) as ranks:
        await beside(ranks, expected, 24, 0)
        early = await early_and_whole(ranks, 24)
        async with asyncio.timeout(20):
            await beside(ranks, expected, 24, 0)
        assert ranks.engine.optimism.lost == 1
        await early.whole()
        await early.answers(expected)


async def test_after_its_last_try_a_prompt_waits_for_its_match(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(pages=(SMALL, SMALL), optimistic_tries=2) as ranks:
        early = await begun(ranks, 24)
        for lost in range(2):
            await until(
                lambda lost=lost: counts(ranks) == (lost + 1, 0, lost, 1)  # type: ignore[misc]
            )
            await beside(ranks, expected, 24, lost)
        await until(lambda: all(node.pool.pages.at_rest() for node in ranks.nodes))
        assert counts(ranks) == (2, 0, 2, 0) and ranks.engine._early.first is None
        await early.answers(expected)


async def test_a_prompt_loses_its_places_when_only_the_other_rank_knows_that_it_has_started(
    grouped: Grouped, expected: Expected
) -> None:
    """The first rank's word about places comes in the order of the steps."""
    async with grouped(pages=(SMALL, SMALL), optimistic_tries=1) as ranks:
        early = await early_and_whole(ranks, 24)
        held: list[RankRequest] = []
        start = ranks.group._start

        def hold(started: RankRequest) -> None:
            (held.append if started.key.ticket == early.ticket else start)(started)

        ranks.group._start = hold  # type: ignore[method-assign]
        decoded = early.meet()
        await until(lambda: bool(held) and ranks.follower.requests[early.ticket].started)
        await beside(ranks, expected)
        assert (
            counts(ranks) == (1, 0, 1, 0) and early.phases == [PrefillPhase.WAITING_FOR_INPUT] * 2
        )
        start(held[0])
        ranks.engine.wake()
        assert await decoded == expected(early.prompt)
        await early.leg
        assert counts(ranks) == (1, 0, 1, 0)


async def test_a_rank_that_hears_late_of_the_start_sends_then(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(chunk_tokens=8, optimistic_tries=1) as ranks:
        early = await early_and_whole(ranks, 40)
        held: list[int] = []
        started = ranks.follower.started
        ranks.follower.started = held.append  # type: ignore[method-assign, assignment]
        decoded = early.meet()
        await until(lambda: bool(held) and ranks.follower.requests[early.ticket].kept)
        await until(lambda: early.phases == [PrefillPhase.SUCCESS, PrefillPhase.WAITING_FOR_INPUT])
        assert not decoded.done()
        started(held[0])
        assert await decoded == expected(early.prompt)
        await early.leg


async def test_decode_comes_while_another_prompt_is_computed(
    grouped: Grouped, expected: Expected
) -> None:
    async with grouped(optimistic_tries=1) as ranks:
        early = await early_and_whole(ranks, 24)
        with Watched(ranks.follower.steps.runner, held=True) as gate:
            other = await begun(ranks, 20, 1)
            await until(gate.entered.is_set)
            await early.answers(expected)
        await other.answers(expected)


async def test_the_token_of_a_computation_that_was_lost_is_not_taken(
    grouped: Grouped, expected: Expected
) -> None:
    """What is computed again may choose another token."""
    async with grouped(pages=(SMALL, SMALL), optimistic_tries=2) as ranks:
        held = ranks.hold(wire.FirstToken)
        taken: list[tuple[int, int]] = []
        on_token = ranks.steps._on_token

        def take(ticket: int, token: TokenOut) -> None:
            taken.append((ticket, token.token_id))
            on_token(ticket, token)

        ranks.steps._on_token = take
        early = await begun(ranks, 24)
        await until(lambda: early.computed == (24, 24) and bool(held))
        await beside(ranks, expected)
        computing = ranks.group._asked[early.ticket].computing
        assert computing is not None and counts(ranks)[2] == 1
        message = wire.parse_at_first(held[0])
        assert isinstance(message, wire.FirstToken) and message.ticket == early.ticket
        other_token = TokenOut(expected(early.prompt)[0] + 1)
        ranks.dealer.send(wire.encode(msgspec.structs.replace(message, token=other_token)))
        after: list[int] = []
        ranks.steps._on_opened = lambda rank, ticket: after.append(ticket)
        ranks.dealer.send(wire.encode(wire.Opened(ticket=1 << 40)))
        await until(lambda: after == [1 << 40])
        await early.whole()
        assert [token for ticket, token in taken if ticket == early.ticket] == [
            expected(early.prompt)[0]
        ]
        await early.answers(expected)


async def test_a_prompt_waits_until_every_rank_has_dropped_what_it_needs(
    grouped: Grouped, expected: Expected
) -> None:
    """A rank without places could take no part in a step."""
    async with grouped(pages=(40, SMALL)) as ranks:
        assert ranks.group.limits.max_tokens == SMALL * PAGE_SIZE + 1
        with pytest.raises(CapacityError, match=f"limit {SMALL * PAGE_SIZE}"):
            await ranks.prefill(1, prompt_of(SMALL * PAGE_SIZE + 1), greedy(1))
        votes: list[Callable[[], None]] = []
        for shell in ranks.members:
            hold_failures(shell, votes)
        with Watched(ranks.engine.steps.runner, held=True):
            before = await begun(ranks, 24)
            decoded = before.meet()
            await until(lambda: bool(ranks.engine._placed) and ranks.steps._step == 1)
            [first] = ranks.members[0].requests.values()
            first.room.close(Cause(Code.ENGINE_ERROR, "planted"))
            await until(lambda: len(votes) == 2)
        other = asyncio.create_task(ranks.tokens(prompt_of(24, 1), greedy(4)))
        await until(lambda: bool(ranks.engine._waiting))
        for _ in range(50):
            await asyncio.sleep(0)
        assert ranks.steps._step == 1
        for vote in votes:
            vote()
        assert await other == expected(prompt_of(24, 1))
        for leg in (decoded, before.leg):
            with pytest.raises(KvflowError, match="planted"):
                await leg


def hold_failures(shell: MemberShell, votes: list[Callable[[], None]]) -> None:
    """Report what fails at this rank to the group only by `votes`."""
    failed, released = shell.member.failed, shell.member.released

    def hold(key: TicketKey, cause: Cause) -> None:
        def vote() -> None:
            failed(key, cause)
            released(key)
            shell.run()

        votes.append(vote)

    shell.member.failed = hold  # type: ignore[method-assign]
    shell.member.released = lambda key: None  # type: ignore[method-assign]


async def test_decode_never_comes(grouped: Grouped, expected: Expected) -> None:
    async with grouped(pages=(SMALL, SMALL), optimistic_tries=1) as ranks:
        early = await early_and_whole(ranks, 24)
        with pytest.raises(KvflowError) as caught:
            await early.leg
        assert caught.value.cause().code is Code.RENDEZVOUS
        await beside(ranks, expected)


async def test_no_step_names_what_a_generation_has_failed(grouped: Grouped) -> None:
    async with grouped(optimistic_tries=1) as ranks:
        early = await early_and_whole(ranks, 24)
        waiting = await begun(ranks, 250, 1)
        assert ranks.engine.load().waiting == 1, "for pages"
        ranks.group.broken(Cause(Code.ENGINE_ERROR, "planted"))
        assert not ranks.engine._placed and not ranks.engine._running
        with pytest.raises(KvflowError, match="planted"):
            await early.leg
        await until(lambda: waiting.computed[0] > 0)
        waiting.leg.cancel()
        await asyncio.wait([waiting.leg])


MOMENTS = ["in a step", "computed", "lost"]
WAYS = ["its client leaves", "its room ends at one rank", "a step fails", "a rank is lost"]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS)
async def test_an_end_at_any_moment_leaves_nothing_at_any_rank(
    moment: str, way: str, grouped: Grouped, expected: Expected
) -> None:
    options = {"pages": (SMALL, SMALL + 2), "chunk_tokens": 8, "optimistic_tries": 1}
    async with grouped(drops_frames=True, **options) as ranks:
        gate = Watched(ranks.follower.steps.runner, held=moment == "in a step")
        early = await begun(ranks, 24)
        if moment == "in a step":
            await until(gate.entered.is_set)
        else:
            await early.whole()
        if moment == "lost":
            await beside(ranks, expected, 20, 1)
            assert counts(ranks) == (1, 0, 1, 0)
        replacing: asyncio.Task[None] | None = None
        if way == "its client leaves":
            early.leg.cancel()
        elif way == "its room ends at one rank":
            [request] = ranks.members[1].requests.values()
            request.room.close(Cause(Code.ENGINE_ERROR, "planted"))
        elif way == "a step fails":
            ranks.follower._receive(
                wire.Plan(generation=1, step=99, rows=(wire.PlannedRow(early.ticket, 0, 1, 0),))
            )
        elif way == "a rank is lost":
            replacing = asyncio.create_task(ranks.replace_second())
            await asyncio.sleep(0)
        gate.gate.set()
        if replacing is not None:
            await replacing
        if (way, moment) == ("a step fails", "lost"):
            assert await early.meet() == expected(early.prompt)
        await asyncio.wait([early.leg])
        codes = {"its room ends at one rank": Code.ENGINE_ERROR, "a rank is lost": Code.PEER_LOST}
        if way in codes:
            error = early.leg.exception()
            assert isinstance(error, KvflowError) and error.cause().code is codes[way]
        await ranks.home()
        await beside(ranks, expected, 24, 2)
