"""What prefill's scheduler side tells the workers of a preemption. The rest: test_model.py."""

from __future__ import annotations

from types import SimpleNamespace

from kvflow.connectors.vllm.messages import StepMeta
from kvflow.connectors.vllm.params import ToDecode
from kvflow.connectors.vllm.prefill_scheduler import PrefillScheduler


def test_a_preempted_request_that_has_ended_is_waited_for_all_the_same() -> None:
    """vLLM has given its blocks away, and a write may still read them."""
    side = PrefillScheduler(16, {})
    status = SimpleNamespace(name="FINISHED_ABORTED")
    request = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        lora_request=None,
        mm_features=None,
        status=status,
    )
    side.new_request(request, ToDecode(7))
    assert side.finished(request, ([],)) == (True, None)
    meta = StepMeta()
    side.build_meta(meta, SimpleNamespace(preempted_req_ids={"r", "another's"}, num_scheduled_tokens={}))
    assert meta.preempted == ["r"] and meta.finished == {"r": True}
