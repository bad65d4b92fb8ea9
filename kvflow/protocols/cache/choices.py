"""Choices that configure a prefix cache, spelled as in the settings."""

from __future__ import annotations

from typing import Literal, TypeAlias

EvictionPolicy: TypeAlias = Literal["lru", "lfu", "slru", "priority", "depth"]
WritePolicy: TypeAlias = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy: TypeAlias = Literal["best_effort", "timeout", "wait_complete"]
Dialect: TypeAlias = Literal["vllm", "sglang"]
"""The engine whose tier names appear in events: see `kvflow.protocols.wire.kv_events.media_of`."""
