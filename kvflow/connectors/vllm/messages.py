"""Messages between the two sides of a connector.

vLLM carries them from the scheduler's process to every worker's process before a step, and back
with the step's output. The processes belong to one engine, and vLLM pickles the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvflow.connectors.vllm.groups import Blocks
from kvflow.protocols.errors import Cause

Prompt = NDArray[np.uint32]


@dataclass
class OpenSource:
    """A request whose half of a room opens at prefill."""

    request: str
    room: int
    prompt: Prompt


@dataclass
class Computed:
    """The blocks that prefill has computed for a request when the step ends.

    In each space they start with the request's first block. Without `is_all`, the lists have full
    blocks only.
    """

    blocks: Blocks
    is_all: bool


@dataclass
class OpenTarget:
    """A request whose half of a room opens at decode. Without an `Offer` in the same step, the room
    is only announced.

    `prefill` lists the registries of prefill's workers, "host:port", by worker number. If the
    request cannot be loaded, `refusal` is the reason. The worker then sends the reason to prefill
    and reports it to vLLM.
    """

    request: str
    room: int
    prefill: Sequence[str]
    prompt: Prompt
    refusal: Cause | None = None


@dataclass
class Offer:
    """Decode's blocks for the prompt after its first `prefix_tokens` tokens.

    `blocks` is empty if decode already has everything that it can use. `refusal` is the reason if
    vLLM lacks some of the blocks: the load then fails.
    """

    blocks: Blocks
    prefix_tokens: int
    refusal: Cause | None = None

    @property
    def is_waited_for(self) -> bool:
        """True while vLLM waits for these blocks."""
        return any(self.blocks)


@dataclass
class StepMeta:
    """The message that goes from the scheduler side to the workers with a step, by request id."""

    sources: list[OpenSource] = field(default_factory=list)
    # prefill: requests that are certain to get all of their blocks
    begun: list[str] = field(default_factory=list)
    computed: dict[str, Computed] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    # prefill: requests that ended, each with True if it was aborted
    finished: dict[str, bool] = field(default_factory=dict)
    targets: list[OpenTarget] = field(default_factory=list)
    offers: dict[str, Offer] = field(default_factory=dict)
    # decode: failed loads whose blocks are kept, with the workers that may now report to vLLM
    held: dict[str, set[int]] = field(default_factory=dict)
    # decode: requests that ended before their load did
    abandoned: list[str] = field(default_factory=list)
    idle: bool = False  # no model runs in this step; the engine only waits for kvflow


@dataclass
class StepNews:
    """News from the workers to the scheduler side, besides the results that vLLM collects."""

    # decode: by request, the workers at which prefill has begun or will never begin
    ready: dict[str, set[int]] = field(default_factory=dict)
    # first cause of each failed load
    failed: dict[str, Cause] = field(default_factory=dict)
    failures: dict[str, set[int]] = field(default_factory=dict)  # workers at which the load failed
    # decode: workers of `failures` at which no write can reach the blocks any more
    released: dict[str, set[int]] = field(default_factory=dict)

    def aggregate(self, other: StepNews) -> StepNews:
        return StepNews(
            _joined(self.ready, other.ready),
            other.failed | self.failed,
            _joined(self.failures, other.failures),
            _joined(self.released, other.released),
        )


def _joined(ours: dict[str, set[int]], theirs: dict[str, set[int]]) -> dict[str, set[int]]:
    return {name: ours.get(name, set()) | theirs.get(name, set()) for name in ours | theirs}
