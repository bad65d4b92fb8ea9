"""What vLLM carries between the two sides of a connector: from the scheduler's process to every
worker's before a step, and back with the step's output. One machine's own processes; vLLM pickles
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import Cause

Prompt = NDArray[np.uint32]


@dataclass
class OpenSource:
    """Prefill's half of a room begins."""

    request: str
    room: int
    prompt: Prompt


@dataclass
class Computed:
    """Prefill: the request's blocks when the step is over, from its first; only full ones unless it
    is all.
    """

    blocks: Sequence[int]
    is_all: bool


@dataclass
class OpenTarget:
    """Decode's half of a room begins; without an `Offer` in the same step it is only announced.

    `prefill`: the registries of its workers, "host:port", by number. `refusal`: why nothing can be
    loaded; the worker tells prefill, and vLLM.
    """

    request: str
    room: int
    prefill: Sequence[str]
    prompt: Prompt
    refusal: Cause | None = None


@dataclass
class Offer:
    """Decode: the blocks for the prompt after its first `prefix_tokens`; none where it has all that
    it can use.
    """

    blocks: Sequence[int]
    prefix_tokens: int

    @property
    def is_waited_for(self) -> bool:
        """Whether vLLM waits for them."""
        return bool(self.blocks)


@dataclass
class StepMeta:
    """All that a step tells the workers. Keys are ids of requests."""

    sources: list[OpenSource] = field(default_factory=list)
    # prefill: requests that are sure to get all of their blocks.
    begun: list[str] = field(default_factory=list)
    computed: dict[str, Computed] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    # prefill: requests, and whether they were aborted.
    finished: dict[str, bool] = field(default_factory=dict)
    targets: list[OpenTarget] = field(default_factory=list)
    offers: dict[str, Offer] = field(default_factory=dict)
    # decode: the blocks of loads that failed are kept; the workers at which they did may tell vLLM
    held: dict[str, set[int]] = field(default_factory=dict)
    # decode: requests that ended before their load did.
    abandoned: list[str] = field(default_factory=list)
    idle: bool = False  # no model runs in this step: the engine only waits for us


@dataclass
class StepNews:
    """What workers tell the scheduler side, beside what vLLM asks for."""

    # decode: the workers at which a load waits for its prefill no longer: that has begun, or never
    # will
    ready: dict[str, set[int]] = field(default_factory=dict)
    failed: dict[str, Cause] = field(default_factory=dict)  # the first cause counts
    failures: dict[str, set[int]] = field(default_factory=dict)  # at which workers
    # Of those: where nothing can write any more.
    released: dict[str, set[int]] = field(default_factory=dict)

    def aggregate(self, other: StepNews) -> StepNews:
        """What two workers tell."""
        return StepNews(
            _joined(self.ready, other.ready),
            other.failed | self.failed,
            _joined(self.failures, other.failures),
            _joined(self.released, other.released),
        )


def _joined(ours: dict[str, set[int]], theirs: dict[str, set[int]]) -> dict[str, set[int]]:
    return {name: ours.get(name, set()) | theirs.get(name, set()) for name in ours | theirs}
