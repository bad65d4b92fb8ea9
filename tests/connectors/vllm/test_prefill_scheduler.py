"""Which request may begin at prefill, and what the workers are told. The rest: test_model.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.connectors.vllm.messages import StepMeta
from kvflow.connectors.vllm.params import ToDecode
from kvflow.connectors.vllm.prefill_scheduler import PrefillScheduler
from tests.connectors.vllm.worker_pair import one_group

BLOCK, CACHE = 16, 10


def request(name: str, blocks: int = 1, status: str = "RUNNING") -> Any:
    tokens = blocks * BLOCK - 3
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=[*range(tokens)],
        num_prompt_tokens=tokens,
        lora_request=None,
        mm_features=None,
        status=SimpleNamespace(name=status),
    )


def planned(side: PrefillScheduler) -> StepMeta:
    meta = StepMeta()
    side.build_meta(meta, SimpleNamespace(preempted_req_ids=None, num_scheduled_tokens={}))
    return meta


class TestPlaces:
    def side(self, **blocks: int) -> tuple[PrefillScheduler, dict[str, Any]]:
        side = PrefillScheduler(one_group(BLOCK), {})
        side.num_blocks = CACHE
        requests = {name: request(name, count) for name, count in blocks.items()}
        for number, each in enumerate(requests.values()):
            side.new_request(each, ToDecode(number + 1))
        return side, requests

    def test_what_has_begun_leaves_no_place_for_more_than_the_cache(self) -> None:
        side, of = self.side(a=4, b=6, c=1)
        assert side.may_begin(of["a"]) and side.may_begin(of["b"]) and not side.may_begin(of["c"])
        assert side.may_begin(of["a"]), "it has its place, also after a preemption"
        assert side.may_begin(request("another's", 99))
        planned(side)
        side.sent({"a"})
        assert side.may_begin(of["c"])

    def test_none_passes_one_that_is_held_up(self) -> None:
        side, of = self.side(a=4, b=7, c=1)
        assert (
            side.may_begin(of["a"]) and not side.may_begin(of["b"]) and not side.may_begin(of["c"])
        )
        planned(side)
        assert side.may_begin(of["c"]), "vLLM does not ask for b now"

    def test_one_that_is_larger_than_the_cache_is_vllms_affair(self) -> None:
        side, of = self.side(a=CACHE + 1, b=1)
        assert side.may_begin(of["a"]) and not side.may_begin(of["b"])

    def test_a_request_that_is_not_ours_is_not_kept(self) -> None:
        side, _ = self.side()
        anothers = request("another's", 1, "FINISHED_LENGTH_CAPPED")
        assert side.finished(anothers, ([3],)) == (False, None)
        assert planned(side).computed == {}

    @pytest.mark.parametrize("streams", [False, True])
    def test_an_aborted_request_leaves_its_place_when_its_blocks_are_free(
        self, streams: bool
    ) -> None:
        side = PrefillScheduler(one_group(BLOCK), {})
        side.num_blocks = CACHE
        first, second = request("a", CACHE, "FINISHED_ABORTED"), request("b")
        side.new_request(first, ToDecode(7 if streams else None))
        side.new_request(second, ToDecode(8))
        assert side.may_begin(first)
        assert side.finished(first, ([],)) == (streams, None)
        assert side.may_begin(second) is not streams
        planned(side)
        side.sent({"a"})
        assert side.may_begin(second)

    def test_decode_is_told_when_it_has_its_first_blocks(self) -> None:
        side, of = self.side(a=4, unasked=4)
        side.new_request(sequential := request("sequential", 1), ToDecode(None))
        for each in (of["a"], sequential):
            assert side.may_begin(each)
        assert planned(side).begun == []
        for each in (*of.values(), sequential):
            side.allocated(each)
        # vLLM did not ask for the other: it counts, and is told at its end.
        assert planned(side).begun == ["a"]
        assert not side.may_begin(request_of(side, 2)), "4 and 4 and 1 of 10 are taken"
        of["unasked"].status.name = "FINISHED_LENGTH_CAPPED"
        side.finished(of["unasked"], ([0] * 4,))
        assert planned(side).begun == ["unasked"]


def request_of(side: PrefillScheduler, blocks: int) -> Any:
    found = request("late", blocks)
    side.new_request(found, ToDecode(99))
    return found


def test_a_preempted_request_that_has_ended_is_waited_for_all_the_same() -> None:
    """vLLM has given its blocks away, and a write may still read them."""
    side = PrefillScheduler(one_group(BLOCK), {})
    aborted = request("r", status="FINISHED_ABORTED")
    side.new_request(aborted, ToDecode(7))
    assert side.finished(aborted, ([],)) == (True, None)
    meta = StepMeta()
    side.build_meta(
        meta, SimpleNamespace(preempted_req_ids={"r", "another's"}, num_scheduled_tokens={})
    )
    assert meta.preempted == ["r"] and meta.finished == {"r": True}
