"""`ModelPart`, the part of a model that one process runs, and the division into stages."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.messages import MAX_RANKS


@dataclass(frozen=True)
class ModelPart:
    """One shard of one stage of a model; by default, the whole model.

    A stage is a run of consecutive layers. Its shards compute each layer together.
    """

    stage: int = 0
    stages: int = 1
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        for what, index, count in (
            ("stage", self.stage, self.stages),
            ("shard", self.shard, self.shards),
        ):
            if not 1 <= count <= MAX_RANKS or not 0 <= index < count:
                raise MisuseError(
                    f"{what} {index} of {count}: a {what} is 0..count-1, and the count "
                    f"1..{MAX_RANKS}"
                )

    @property
    def ranks(self) -> int:
        return self.stages * self.shards

    @property
    def rank(self) -> int:
        """The rank in the whole model; the shards of one stage have consecutive ranks."""
        return self.stage * self.shards + self.shard

    @property
    def beside(self) -> range:
        """The ranks of all shards of this stage, this one included."""
        return range(self.stage * self.shards, (self.stage + 1) * self.shards)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes logits."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        return range(self.stage * count // self.stages, (self.stage + 1) * count // self.stages)

    def __str__(self) -> str:
        stage = f"stage {self.stage} of {self.stages}" if self.stages > 1 else ""
        shard = f"shard {self.shard} of {self.shards}" if self.shards > 1 else ""
        return ", ".join(filter(None, (stage, shard))) or "the whole model"


WHOLE = ModelPart()


@dataclass(frozen=True)
class Meeting:
    """The directory in which the processes of one model find each other.

    Only its owner may enter it. It begins empty, and the process that made it removes it.

    `attempt` counts how often a stage's shards were started before. `load_timeout_s` limits how
    long a process waits for the others to load their parts; `collective_timeout_s` limits how long
    one shard waits for another in a step.
    """

    directory: Path
    attempt: int = 0
    load_timeout_s: float = 1800.0
    collective_timeout_s: float = 60.0

    def check(self) -> None:
        """Check the directory. Raises: MisuseError if other users may enter it."""
        try:
            found = os.stat(self.directory)
        except OSError as error:
            raise MisuseError(
                f"meeting directory {str(self.directory)!r}: {error.strerror}"
            ) from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise MisuseError(
                f"meeting directory {str(self.directory)!r} has mode "
                f"{stat.S_IMODE(found.st_mode):o} and owner {found.st_uid}: it has to be a "
                f"directory of user {os.geteuid()} with mode 700"
            )


def own_layers(config: Any, part: ModelPart, name: str) -> range:
    """Return the layers of `part`. Raises: MisuseError if the model cannot be cut into stages."""
    text = config.get_text_config()
    count = getattr(text, "num_hidden_layers", None)
    if part.stages == 1:
        return range(count or 0)
    if not isinstance(count, int):
        raise MisuseError(
            f"model {name!r} cannot be cut into stages: its configuration has no num_hidden_layers"
        )
    if part.stages > count:
        raise MisuseError(
            f"model {name!r} has {count} layers: they cannot be cut into {part.stages} stages"
        )
    _check_sharing(text, part, count, name)
    return part.layers(count)


def _check_sharing(text: Any, part: ModelPart, count: int, name: str) -> None:
    """Check that layers that use an earlier layer's K and V are in the same stage as that layer."""
    shared = getattr(text, "num_kv_shared_layers", 0) or 0
    if not shared:
        return
    first = count - shared
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * count)
    sources = [
        max((i for i in range(first) if kinds[i] == kind), default=0)
        for kind in sorted(set(kinds[first:]))
    ]
    for stage in range(1, part.stages):
        cut = stage * count // part.stages
        if cut > min(sources, default=count):
            used = " and ".join(map(str, sorted(sources)))
            raise MisuseError(
                f"model {name!r} cannot be cut into {part.stages} stages before layer {cut}: "
                f"layers {first}..{count - 1} use the K and V of layers {used}, so all of these "
                "have to be in one stage"
            )
