"""Changes to methods of SGLang's queues and scheduler, for what their interface to a backend does
not carry.

All of them call SGLang's own method, and change nothing where another backend is in use.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from kvflow.connectors.sglang.prompts import PromptSlot

_MARK = "_kvflow_original"


def install() -> None:
    """Wrap the methods. Idempotent."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.managers.scheduler import Scheduler

    around(PrefillBootstrapQueue, "add", with_refusal)
    around(PrefillBootstrapQueue, "create_sender", with_prompt)
    around(PrefillBootstrapQueue, "pop_bootstrapped", with_states_published)
    around(DecodePreallocQueue, "add", with_refusal)
    around(DecodePreallocQueue, "_create_receiver_and_enqueue", with_prompt)
    around(DecodeTransferQueue, "_defer_release", until_proof)
    around(Scheduler, "on_idle", with_rest)


def around(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the method `name` of a class by one that calls `wrapper(original, self, ...)`."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, wrapped)


def _is_ours(manager: Any) -> bool:
    """Return True for a manager of this backend. Its module cannot be imported before SGLang's."""
    return isinstance(getattr(manager, "prompts", None), PromptSlot)


class Model:
    """What SGLang's scheduler knows of the model and does not pass to a manager. It is set while
    SGLang makes one.
    """

    window_tokens = 0
    """The length of the sliding window; 0 without one."""
    kv_heads = 0
    """The number of heads of K and V at all ranks together, if the KV cache has them in the order
    of tokens, and 0 otherwise.
    """


MODEL = Model()


def with_model(original: Callable[..., Any], queue: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep what the scheduler of `queue` knows for the manager that `original` makes."""
    MODEL.window_tokens = int(queue.scheduler.sliding_window_size or 0)
    MODEL.kv_heads = _kv_heads(queue)
    try:
        return original(queue, *args, **kwargs)
    finally:
        MODEL.window_tokens = MODEL.kv_heads = 0


def _kv_heads(queue: Any) -> int:
    if getattr(queue.token_to_kv_pool, "kv_cache_layout", "") != "nhd":
        return 0
    return int(queue.scheduler.model_config.get_total_num_kv_heads())


def with_prompt(
    original: Callable[..., Any], queue: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep the request's prompt for the sender or the receiver that `original` makes."""
    manager = queue.kv_manager
    if not _is_ours(manager):
        return original(queue, request, *args, **kwargs)
    with manager.prompts.holding(request):
        return original(queue, request, *args, **kwargs)


def with_refusal(
    original: Callable[..., Any], queue: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Send the other side the reason if SGLang refuses a request here.

    SGLang refuses a prompt that is too long before it makes a sender or a receiver. The other half
    of the request would wait for as long as one half waits for the other.
    """
    manager = queue.kv_manager
    if not _is_ours(manager):
        return original(queue, request, *args, **kwargs)
    kept = _requests_in(queue)
    result = original(queue, request, *args, **kwargs)
    if _requests_in(queue) == kept:
        manager.refuse(request)
    return result


def _requests_in(queue: Any) -> int:
    return len(queue.queue) + len(getattr(queue, "retracted_queue", ()))


def with_states_published(original: Callable[..., Any], queue: Any) -> Any:
    """Poll the senders of a later stage, which publishes their states to the first stage.

    SGLang polls the first stage only, and sends its states to the others.
    """
    manager = queue.kv_manager
    if _is_ours(manager) and manager.place.stage:
        for request in queue.queue:
            request.disagg_kv_sender.poll()
    return original(queue)


def until_proof(original: Callable[..., Any], queue: Any, request: Any) -> Any:
    """Hold the pages of a failed request until there is proof, and not only for SGLang's time.

    SGLang releases them after SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT even if
    prefill may still write into them.
    """
    manager = getattr(request.kv_receiver, "kv_mgr", None)
    if _is_ours(manager):
        queue.deferred_kv_release_timeout = math.inf
    return original(queue, request)


def with_rest(original: Callable[..., Any], scheduler: Any) -> None:
    """Wait for news of the node after a step in which the scheduler had nothing to compute.

    SGLang polls without a pause while requests wait for pages. That takes a core, and Python's lock
    from the node's thread, whose news it polls for.
    """
    original(scheduler)
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    manager: Any = getattr(queue, "kv_manager", None)
    if _is_ours(manager):
        manager.rest()
