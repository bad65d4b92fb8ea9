"""Which blocks of a request travel in each group; the rest: test_model.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connectors.vllm.decode_scheduler import DecodeScheduler
from kvflow.connectors.vllm.groups import Group, Groups
from kvflow.connectors.vllm.messages import StepMeta
from kvflow.connectors.vllm.params import FromPrefill, ToDecode
from kvflow.connectors.vllm.prefill_scheduler import PrefillScheduler
from kvflow.protocols.pages.layout import Space

SIZE, WINDOW, NULL = 16, 20, 0
# In vLLM's order: states, each after 32 tokens, full attention, a window.
STATE = Group(0, ("s",), Space("state", 100, 0), 2, 32)
FULL = Group(1, ("k",), Space("pages", 100, SIZE))
SLIDING = Group(2, ("w",), Space("window", 100, SIZE, WINDOW - 1), 3)
GROUPS = Groups([FULL, STATE, SLIDING])
# 80 tokens, of which 79 travel.
STATES, PAGES, LAST = [NULL, NULL, 8], [1, 2, 3, 4, 5], [NULL, NULL, NULL, 6, 7]


def request(tokens: int = 80, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    ids = list(range(tokens))
    return SimpleNamespace(
        request_id="a",
        prompt_token_ids=ids,
        _all_token_ids=list(ids),
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        max_tokens=16,
        sampling_params=SimpleNamespace(min_tokens=4),
        lora_request=None,
        mm_features=(),
        trace_headers=None,
        status=SimpleNamespace(name=status),
    )


@pytest.mark.parametrize(
    ("computed", "filled"),
    [
        (40, [[1, 2], [], [NULL, NULL]]),
        (78, [[1, 2, 3, 4], [], [NULL, NULL, NULL, 6]]),
        (79, [PAGES, [8], LAST]),
        (80, [PAGES, [8], LAST]),
    ],
)
def test_a_state_is_final_with_the_last_token(computed: int, filled: list[list[int]]) -> None:
    assert GROUPS.filled((STATES, PAGES, LAST), 79, computed) == filled
    # Blocks of the answer do not travel.
    answer = (STATES, [*PAGES, 9], [*LAST, 9])
    assert GROUPS.filled(answer, 79, computed) == filled


@pytest.mark.parametrize(
    ("prefix", "lent"),
    [(0, [PAGES, [8], [6, 7]]), (32, [[3, 4, 5], [8], [6, 7]]), (64, [[5], [8], [7]])],
)
def test_a_window_needs_the_tokens_that_the_last_one_reads(
    prefix: int, lent: list[list[int]]
) -> None:
    """Token 79 reads tokens 60 to 79, and block 3 begins with token 48."""
    assert GROUPS.lent((STATES, PAGES, LAST), 79, prefix) == lent


def test_what_is_held_at_once_is_bounded_by_the_window() -> None:
    assert GROUPS.most_blocks(80) == 5 + 2 + 3
    assert GROUPS.most_blocks(20) == 2 + 2 + 2


def test_prefill_computes_no_more_than_what_travels() -> None:
    side, asked = PrefillScheduler(GROUPS, {}), request()
    side.new_request(asked, ToDecode(7))
    assert asked.prompt_token_ids == asked._all_token_ids == list(range(79))
    assert (asked.num_prompt_tokens, asked.max_tokens, asked.sampling_params.min_tokens) == (
        79,
        1,
        0,
    )
    meta = StepMeta()
    side.build_meta(meta, SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={}))
    assert len(meta.sources[0].prompt) == 79


def test_a_prompt_of_one_token_is_computed_at_decode() -> None:
    prefill, decode = PrefillScheduler(GROUPS, {}), DecodeScheduler(GROUPS, 1)
    for params in (ToDecode(7), ToDecode(None)):
        prefill.new_request(first := request(1), params)
        assert first.num_prompt_tokens == 1
        assert prefill.finished(first, ([8], [1], [6])) == (False, None)
    decode.new_request(second := request(1), FromPrefill(7, "127.0.0.1", 8998))
    assert decode.tokens_to_load(second, 0) == 0
    decode.build_meta(meta := StepMeta())
    assert not meta.targets


@pytest.mark.parametrize("streams", [False, True])
def test_blocks_that_vllm_has_not_kept_are_not_sent(streams: bool) -> None:
    """Another request may have them: no null block, and none behind it, goes to decode."""
    side, asked = PrefillScheduler(GROUPS, {}), request()
    side.num_blocks = 100
    side.new_request(asked, ToDecode(7 if streams else None))
    lost = (STATES, PAGES, [NULL, NULL, NULL, NULL, 7])
    meta = StepMeta()
    if streams:
        side.block_ids_of = lambda name: lost
        planned = SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={"a": 79})
        side.build_meta(meta, planned)
        assert meta.computed["a"].is_all and not any(meta.computed["a"].blocks)
    else:
        assert side.finished(asked, lost) == (False, None)


def test_a_load_for_which_vllm_lacks_a_block_fails_by_name() -> None:
    side, asked = DecodeScheduler(GROUPS, 1), request()
    side.new_request(asked, FromPrefill(7, "127.0.0.1", 8998, is_computed=True))
    side.allocated(asked, (STATES, PAGES, [NULL, NULL, NULL, NULL, 7]), 79)
    side.build_meta(meta := StepMeta())
    refusal = meta.offers["a"].refusal
    assert refusal is not None and "vLLM lacks blocks of 'window'" in refusal.text
    assert meta.offers["a"].is_waited_for
