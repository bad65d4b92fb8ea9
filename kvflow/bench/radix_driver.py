"""A driver that runs the steps of `cache.py` on SGLang's prefix tree with its compiled core.

It runs under the peer's Python, and imports no module of kvflow.

    PYTHONPATH=DIR/shim:SOURCE PEER_PYTHON radix_driver.py      (DIR holds the harness)

It reads commands and writes replies as JSON lines, like `worker.py`: prompts, measure, quit.
`cache.py` describes the measurements.
"""

from __future__ import annotations

import contextlib
import gc
import json
import random
import sys
import time
from array import array
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

# Copies of constants in `cache_trace.py` and `cache.py`.
BLOCK_TOKENS = 512
SHAPE_PAGE_SIZE = 16
LEAVES, LEAF_TOKENS, EVICTIONS = 50_000, 32, 20
DEEP_TOKENS, DEPTH, MATCHES = 131_072, 1_024, 10
VOCABULARY = 1 << 17


class Allocator:
    """An allocator whose calls have no effect, so that only the tree is measured."""

    device = "cpu"

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def free(self, indices: object) -> None: ...

    def free_segment(self, indices: object, start_pos: int = 0, **more: object) -> None: ...

    def available_size(self) -> int:
        return 1 << 60

    def get_kvcache(self) -> None: ...

    def is_slot_allocated(self, *slot: object) -> bool:
        return True


def make_tree(page_size: int, events: bool = False) -> Any:
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=Allocator(page_size),
            page_size=page_size,
            enable_kv_cache_events=events,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="rust",
        )
    )


def replay(prompts: list[Any], page_size: int, capacity: int, events: bool) -> dict[str, Any]:
    tree = make_tree(page_size, events)
    encoder = msgspec.msgpack.Encoder()
    seconds: dict[str, list[float]] = {
        "match": [],
        "lock": [],
        "evict": [],
        "insert": [],
        "events": [],
    }
    clock = time.thread_time
    hits = total = held = 0
    # As in `cache.measure`, frozen prompts do not lengthen garbage collections during the replay.
    gc.collect()
    gc.freeze()
    for num_tokens, blocks in prompts:
        spread = np.array(blocks, np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        ids = array("q", spread.reshape(-1)[: min(num_tokens, capacity * page_size)].tobytes())
        count = len(ids) // page_size * page_size
        total += num_tokens
        if not count:
            continue
        slots = torch.arange(len(ids), dtype=torch.int64)
        began_s = clock()
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
        matched_s = clock()
        have = found.device_prefix_len
        lock = tree.inc_lock_ref(found.last_device_node)
        locked_s = clock()
        if (excess := held + count - have - capacity * page_size) > 0:
            evicting_s = clock()
            evicted = tree.evict(EvictParams(num_tokens=excess))
            seconds["evict"].append(clock() - evicting_s)
            held -= evicted.num_tokens_evicted
        inserting_s = clock()
        tree.insert(InsertParams(key=RadixKey(ids), value=slots))
        inserted_s = clock()
        tree.dec_lock_ref(
            found.last_device_node, lock.to_dec_params() if hasattr(lock, "to_dec_params") else None
        )
        seconds["lock"].append(clock() - inserted_s + locked_s - matched_s)
        seconds["match"].append(matched_s - began_s)
        seconds["insert"].append(inserted_s - inserting_s)
        if events:
            taking_s = clock()
            if taken := tree.take_events():
                encoder.encode(KVEventBatch(ts=0.0, events=taken))
            seconds["events"].append(clock() - taking_s)
        held += count - have
        hits += have
    gc.unfreeze()
    return {"seconds": seconds, "hit_rate": hits / total}


def evict_us() -> float:
    gc.collect()
    tree, draw = make_tree(SHAPE_PAGE_SIZE), random.Random(1)
    for leaf in range(LEAVES):
        ids = [leaf] * SHAPE_PAGE_SIZE + [
            draw.randrange(VOCABULARY) for _ in range(LEAF_TOKENS - SHAPE_PAGE_SIZE)
        ]
        tree.insert(InsertParams(key=RadixKey(array("q", ids)), value=torch.arange(LEAF_TOKENS)))
    began_s = time.thread_time()
    for _ in range(EVICTIONS):
        tree.evict(EvictParams(num_tokens=LEAF_TOKENS))
    return (time.thread_time() - began_s) / EVICTIONS * 1e6


def deep_match_us() -> float:
    gc.collect()
    tree, draw = make_tree(SHAPE_PAGE_SIZE), random.Random(1)
    ids = array("q", [draw.randrange(VOCABULARY) for _ in range(DEEP_TOKENS)])
    for end in range(DEEP_TOKENS // DEPTH, DEEP_TOKENS + 1, DEEP_TOKENS // DEPTH):
        tree.insert(InsertParams(key=RadixKey(ids[:end]), value=torch.arange(end)))
    if tree.match_prefix(MatchPrefixParams(key=RadixKey(ids))).device_prefix_len != DEEP_TOKENS:
        raise RuntimeError(f"less than {DEEP_TOKENS} tokens were matched")
    began_s = time.thread_time()
    for _ in range(MATCHES):
        tree.match_prefix(MatchPrefixParams(key=RadixKey(ids)))
    return (time.thread_time() - began_s) / MATCHES * 1e6


def main() -> None:
    torch.set_num_threads(1)
    prompts: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "quit":
            break
        reply: dict[str, Any] = {}
        # stdout carries the replies, so whatever the peer prints goes to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            if do == "prompts":
                prompts = command["prompts"]
            else:
                reply = {
                    **replay(prompts, **command),
                    "evict_us": evict_us(),
                    "deep_match_us": deep_match_us(),
                }
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
