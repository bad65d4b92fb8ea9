"""The simulated fleet: its times follow from the profile, its rules are the engine's."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from kvflow.plan.profile import StepTimes
from kvflow.plan.simulate import Outcome, Sharing, Simulated, simulate
from kvflow.plan.trace import Request, Trace
from tests.plan import profiles as known

TIMES = StepTimes(known.profile())
BLOCK = 16


def request(at_s: float, tokens: int, new: int = 1, first: int = 0) -> Request:
    return Request(at_s, tokens, new, tuple(range(first, first + -(-tokens // BLOCK))))


def played(*requests: Request, prefills: int = 1, decodes: int = 1, **options: Any) -> Simulated:
    sizes = msgspec.structs.replace(known.SIZES, **options.pop("sizes", {}))
    trace = Trace(list(requests), BLOCK)
    return simulate(trace, TIMES, sizes, prefills, decodes, **options)


def outcomes(found: Simulated) -> list[Outcome]:
    return list(found.figures.outcomes)


@pytest.mark.parametrize("tokens", [1, 100, 128, 300, 1000])
def test_a_prompt_alone_takes_what_was_measured(tokens: int) -> None:
    (found,) = outcomes(played(request(5.0, tokens)))
    assert found.first_s == found.end_s == pytest.approx(known.alone_s(tokens), rel=0.01)
    assert math.isnan(found.itl_s)


def test_prompts_that_arrive_at_once_share_steps_up_to_the_tokens_of_one() -> None:
    """Two chunks of 128 fill a step of 256, so the third prompt waits for the second step."""
    group = [request(0, 128, 1, n) for n in (0, 50, 90)]
    firsts = [one.first_s for one in outcomes(played(*group))]
    # The event loop handles all three before the first step.
    handled_s = known.REQUEST_S + 2 * known.BUSY_S
    both_s = 2 * known.prefill_s(128) - known.BASE_S
    line_s = known.transfer_s(128)
    assert firsts[0] == pytest.approx(handled_s + both_s + line_s, rel=0.02)
    # Their pages pass one line.
    assert firsts[1] - firsts[0] == pytest.approx(line_s)
    third_s = handled_s + both_s + known.prefill_s(128) + line_s
    assert firsts[2] == pytest.approx(third_s, rel=0.02)


def test_a_request_that_arrives_later_is_handled_beside_the_step() -> None:
    first, second = request(0, 128, 1, 0), request(0.005, 128, 1, 50)
    found = [one.request.at_s + one.first_s for one in outcomes(played(first, second))]
    assert found[0] == pytest.approx(known.alone_s(128), rel=0.01)
    # Its handling delays no step: the second step follows the first one.
    assert found[1] - found[0] == pytest.approx(known.prefill_s(128), rel=0.02)


def test_running_requests_share_steps() -> None:
    found = outcomes(played(request(0, 16, 50, 0), request(0.001, 16, 50, 9)))
    for one in found:
        assert known.STEP_S + known.ROW_S <= one.itl_s <= known.STEP_S + 2 * known.ROW_S + 1e-9
    later = outcomes(played(request(0, 16, 50, 0), request(10, 16, 50, 9)))
    assert all(one.itl_s == pytest.approx(known.STEP_S + known.ROW_S, rel=0.05) for one in later)


def test_a_short_answer_costs_more_between_its_tokens() -> None:
    short, long, single = outcomes(played(*(request(n, 16, (3, 101, 1)[n]) for n in range(3))))
    for one, gaps in ((short, 2), (long, 100)):
        steps_s = known.STEP_S + known.ROW_S
        assert one.itl_s == pytest.approx(steps_s + known.ANSWER_S / gaps, rel=0.05)
    assert single.end_s == single.first_s


def test_a_prompt_begins_with_what_an_earlier_one_left() -> None:
    first, second, other = request(0, 320, 1), request(1, 320, 1), request(2, 320, 1, 500)
    found = outcomes(played(first, second, other))
    # The last block is computed again, because at least one token is.
    assert [one.cached_tokens for one in found] == [0, 304, 0]
    expected = known.REQUEST_S + known.prefill_s(16, 304) + known.transfer_s(16)
    assert found[1].first_s == pytest.approx(expected, rel=0.02)
    # Prompts that are computed at the same time find nothing.
    assert outcomes(played(first, first))[1].cached_tokens == 0


def test_a_small_pool_forgets_what_was_used_longest_ago() -> None:
    prompts = [request(n, 320, 1, 100 * (n % 3)) for n in range(9)]
    rates = [played(*prompts, prefill_pool=tokens).figures.hit_rate for tokens in (320, 640, 1600)]
    assert rates == [0, 0, pytest.approx(6 / 9 * 304 / 320)]


def test_decodes_pool_delays_a_prompt_and_a_full_promise_delays_it_longer() -> None:
    long = request(0, 100, 1000, 0), request(0, 100, 1000, 50)
    for ratio, waits in ((0.5, False), (1.0, True)):
        sizes = {"decode_pool": 1300, "new_token_ratio": ratio}
        first, second = outcomes(played(*long, sizes=sizes))
        assert (second.first_s > first.end_s) is waits
    alone = outcomes(played(*long, sizes={"max_running": 1}))
    assert alone[1].first_s > alone[0].end_s


def test_the_router_sends_a_prompt_to_where_it_was_sent_before() -> None:
    """Unless that prefill is overloaded."""
    prompts = [request(n, 320, 1, 0) for n in range(4)]
    assert played(*prompts, prefills=3).figures.hit_rate == pytest.approx(3 / 4 * 304 / 320)
    many = [Request(0, 992, 1, (0, *range(100 * n, 100 * n + 61))) for n in range(1, 31)]
    one, two = (played(*many, prefills=n).figures for n in (1, 2))
    assert two.ttft_s(1.0) < 0.8 * one.ttft_s(1.0)


def test_roles_of_one_machine_slow_each_other_down() -> None:
    requests = [request(0, 16, 200, 0), request(0.1, 2000, 1, 50)]
    apart = outcomes(played(*requests))
    beside = outcomes(played(*requests, sharing=Sharing(1.5, 2.0)))
    assert beside[0].itl_s > apart[0].itl_s
    assert beside[1].first_s == pytest.approx(1.5 * apart[1].first_s, rel=0.15)
    slow = outcomes(played(*requests, sharing=Sharing(prefill=3, decode=5)))
    assert slow[0].itl_s == pytest.approx(5 * apart[0].itl_s)
    assert slow[1].first_s == pytest.approx(3 * apart[1].first_s, rel=0.01)


def test_a_step_is_slow_only_while_the_other_role_steps() -> None:
    """One long prefill step begins when the first of `steps` decode steps does."""
    whole = {"chunk_tokens": 2048, "batch_tokens": 2048}
    step_s, decoding_s = known.prefill_s(2000), known.STEP_S + known.ROW_S
    for steps in (4, 1000):
        requests = request(0, 16, steps + 1), request(0.004, 2000, 1, 50)
        found = outcomes(played(*requests, sizes=whole, sharing=Sharing(2.0, 1.0)))
        begun_s = known.alone_s(16) - known.transfer_s(16)
        beside_s = min(steps * decoding_s, 2 * step_s)
        ended_s = begun_s + step_s + beside_s / 2 + known.transfer_s(2000)
        assert 0.004 + found[1].first_s == pytest.approx(ended_s, rel=0.01)
    # A decode step that begins alone slows down when a prefill step begins.
    alone, slowed = (
        outcomes(played(request(0, 16, 2), request(0.008, 128, 1, 50), sharing=sharing))[0].end_s
        for sharing in (Sharing(), Sharing(1.0, 3.0))
    )
    assert slowed - alone == pytest.approx(2 * (alone - 0.018 - known.ANSWER_S), rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_every_request_ends(seed: int) -> None:
    """Whatever the pools, also those that hold less than one request."""
    draw = random.Random(seed)
    requests = [
        request(draw.random() * 5, draw.randint(1, 1500), draw.randint(1, 200), draw.randint(0, 40))
        for _ in range(60)
    ]
    found = played(
        *sorted(requests),
        prefills=draw.randint(1, 3),
        decodes=draw.randint(1, 3),
        prefill_pool=draw.choice((16, 1000, 1 << 20)),
        decode_pool=draw.choice((16, 1000, 1 << 20)),
    )
    for one in outcomes(found):
        assert TIMES.request_s < one.first_s <= one.end_s
        assert 0 <= one.cached_tokens < one.request.prompt_tokens
        if one.request.new_tokens > 1:
            assert one.itl_s >= known.STEP_S
    assert found.figures.tokens_s > 0
    assert found.prefill_peak_tokens >= max(one.prompt_tokens for one in requests)
