"""What can be chosen of a prefix cache, by the names that settings have.

The code beside each choice says what it does: `policies`, `kvflow.serve.cache.tiers`,
`kvflow.serve.engine.scheduler.prefetch`."""

from __future__ import annotations

from typing import Literal, TypeAlias

EvictionPolicy: TypeAlias = Literal["lru", "lfu", "slru", "priority", "depth"]
WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "timeout", "wait_complete"]
Dialect: TypeAlias = Literal["vllm", "sglang"]
"""By whose names events call the media of the tiers: see
`kvflow.protocols.wire.kv_events.media_of`.
"""
