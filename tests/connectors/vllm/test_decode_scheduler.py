"""Decode in vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connectors.vllm import decode_scheduler as module
from kvflow.connectors.vllm.decode_scheduler import DecodeScheduler
from kvflow.connectors.vllm.messages import StepMeta, StepNews
from kvflow.connectors.vllm.params import FromPrefill
from kvflow.protocols.errors import Cause, Code
from tests.connectors.vllm.worker_pair import one_group

SIZE = 16  # tokens in a block
PREFILL = FromPrefill(7, "127.0.0.1", 8998, is_computed=True)


def request(tokens: int, name: str = "a") -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        num_prompt_tokens=tokens,
        trace_headers=None,
        mm_features=(),
        lora_request=None,
        cache_salt=None,
    )


class Blocks:
    def __init__(self) -> None:
        self.blocks, self.touched = list(range(100)), list[int]()

    def touch(self, blocks: Sequence[int]) -> None:
        self.touched += blocks

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.touched.remove(block)


def scheduler(workers: int = 1, **options: int) -> DecodeScheduler:
    made = DecodeScheduler(one_group(SIZE), workers, **options)
    made.block_pool = Blocks()
    return made


@pytest.mark.parametrize(
    ("tokens", "computed", "wanted"),
    [
        (40, 0, 40),
        (40, 16, 24),
        (40, 32, 0),  # what is left is computed here with the last token
        (33, 16, 17),
        (32, 16, 0),
        (16, 0, 16),
        (80, 32, 48),
        (80, 64, 0),
    ],
)
def test_all_travels_but_the_block_of_the_last_token(
    tokens: int, computed: int, wanted: int
) -> None:
    made, asked = scheduler(), request(tokens)
    made.new_request(asked, PREFILL)
    assert made.tokens_to_load(asked, computed) == wanted


@pytest.mark.parametrize(("tokens", "wanted"), [(39, 0), (40, 40)])
def test_a_short_prompt_is_computed_here_and_its_room_ends(tokens: int, wanted: int) -> None:
    made, asked = scheduler(recompute_below=40), request(tokens)
    made.new_request(asked, FromPrefill(7, "127.0.0.1", 8998))
    made.update(StepNews(ready={"a": {0}}), set())
    assert made.tokens_to_load(asked, 0) == wanted
    made.allocated(asked, ([5, 6, 7],), wanted)
    made.build_meta(meta := StepMeta())
    assert [bool(offer.blocks) for offer in meta.offers.values()] == [bool(wanted)]


def test_it_waits_until_every_worker_of_prefill_has_begun() -> None:
    made, asked = scheduler(workers=2), request(40)
    made.new_request(asked, FromPrefill(7, "127.0.0.1", 8998))
    for worker in (0, 1):
        assert made.tokens_to_load(asked, 0) is None
        made.update(StepNews(ready={"a": {worker}}), set())
    assert made.tokens_to_load(asked, 0) == 40


def test_blocks_are_offered_once() -> None:
    """vLLM also tells of blocks for what a request computes by itself."""
    made, asked = scheduler(), request(40)
    made.new_request(asked, PREFILL)
    offers = []
    for blocks in ([5, 6, 7], [8]):
        made.allocated(asked, (blocks,), 40)
        made.build_meta(meta := StepMeta())
        offers.append({name: offer.blocks for name, offer in meta.offers.items()})
    assert offers == [{"a": [[5, 6, 7]]}, {}]
    assert made.tokens_to_load(asked, 0) == 0


def test_a_prefill_for_decodes_of_another_size_is_not_waited_for() -> None:
    made, asked = scheduler(workers=2), request(40)
    made.new_request(asked, FromPrefill(7, "127.0.0.1", 8998, workers=3))
    assert made.tokens_to_load(asked, 0) == 40, "the request fails with the blocks that it gets now"
    made.build_meta(meta := StepMeta())
    assert "prefill is for decodes of 3 workers" in str(meta.targets[0].refusal)


@pytest.mark.parametrize("failures", [({0, 1},), ({0}, {1})], ids=["at once", "in turn"])
def test_blocks_of_a_failed_load_are_kept_once_until_every_worker_has_released_them(
    failures: tuple[set[int], ...],
) -> None:
    made, asked = scheduler(workers=2), request(40)
    made.new_request(asked, PREFILL)
    made.allocated(asked, ([5, 6, 7],), 40)
    assert made.quarantined_blocks == 0
    cause = Cause(Code.PEER_LOST, "prefill is gone")
    for workers in failures:
        received = {"a"} if workers is failures[-1] else set[str]()
        made.update(StepNews(failures={"a": workers}, failed={"a": cause}), received)
    made.build_meta(meta := StepMeta())
    assert made.block_pool.touched == [5, 6, 7] and meta.held == {"a": {0, 1}}
    for worker, left in ((1, 3), (0, 0)):
        made.update(StepNews(released={"a": {worker}}), set())
        assert made.quarantined_blocks == len(made.block_pool.touched) == left


def test_a_room_has_one_life_as_long_as_it_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USED_ROOMS", 2)
    made = scheduler()
    opened = []
    for number, room in enumerate((1, 2, 1, 2, 3, 2, 1)):
        asked = request(40, str(number))
        made.new_request(asked, FromPrefill(room, "127.0.0.1", 8998, is_computed=True))
        opened.append(made.tokens_to_load(asked, 0) == 40)
    assert opened == [True, True, False, False, True, False, True]
