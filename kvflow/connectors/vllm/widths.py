"""Which workers of a prefill serve which workers of a decode, where the two have different numbers
of workers.

Each worker of a decode loads from prefill's registry with its own number. Where a prefill has more
workers, several of them serve one worker of decode together, each with its part of the heads. Where
it has fewer, one worker serves several of decode, each as a node of its own over the part of the
heads that this one has.
"""

from __future__ import annotations

from typing import NamedTuple

from kvflow.protocols.errors import MisuseError


class Place(NamedTuple):
    """The place of a worker in its engine: its shard of every layer, and its stage of layers."""

    shard: int = 0
    shards: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def rank(self) -> int:
        """The number of the worker."""
        return self.stage * self.shards + self.shard

    @property
    def ranks(self) -> int:
        return self.shards * self.stages


class Served(NamedTuple):
    """What one worker of a prefill does for decodes of `workers` workers.

    It serves `serves` of these, from number `first` on. `size` workers of prefill serve one
    together, and among them this one has the number `rank`.
    """

    workers: int
    first: int
    serves: int = 1
    rank: int = 0
    size: int = 1

    @property
    def is_leader(self) -> bool:
        """True if decode's workers find the others of prefill in the registry of this one."""
        return not self.rank

    def port_offset(self, number: int = 0) -> int:
        """Return the distance of a registry port from that of worker 0. The leader has one for each
        of decode's workers, with `number` from 0 to `serves` - 1. The others have the ports behind.
        """
        if self.is_leader:
            return self.first + number
        return self.workers + self.first * (self.size - 1) + self.rank - 1


def served_by(place: Place, decode_workers: int | None) -> Served:
    """Return what the worker at `place` of a prefill does. `decode_workers` is the number of
    workers in each of its decodes; None means as many as here.

    Raises: MisuseError if the workers of one side cannot be divided among those of the other.
    """
    workers = decode_workers or place.ranks
    if workers == place.ranks:
        return Served(workers, place.rank)
    if place.shards % workers == 0:
        together = place.shards // workers
        first, shard = divmod(place.shard, together)
        return Served(workers, first, 1, place.stage * together + shard, place.stages * together)
    if workers % place.shards == 0 and place.stages == 1:
        count = workers // place.shards
        return Served(workers, place.shard * count, count)
    raise MisuseError(
        f"kv_connector_extra_config: decode_workers {workers}: neither a divisor nor (without "
        f"pipeline parallelism) a multiple of --tensor-parallel-size {place.shards} here"
    )


class Heads(NamedTuple):
    """The K/V heads of a model whose layers are divided among the shards of an engine.

    `total` is the number of heads; it is 0 for MLA, whose cache every shard has. If there are fewer
    heads than shards, several shards hold the same head.
    """

    total: int
    shard: int
    shards: int

    @property
    def held(self) -> int:
        """Number of heads in this shard; 0 for MLA."""
        return max(1, self.total // self.shards) if self.total else 0

    @property
    def start(self) -> int:
        """Number of the first of them."""
        return self.shard * self.total // self.shards

    def part(self, axis: int, together: int = 1) -> dict[str, int]:
        """Return our part of a layer's cache, heads along `axis`, as fields of `Part`. `together`
        shards serve one worker of decode.
        """
        # Among those that serve one worker of decode together, this one has copy n of its part.
        copies = (
            together if not self.total else min(together, self.held * self.shards // self.total)
        )
        found = {"replica": self.shard % copies, "replicas": copies}
        if self.total and self.held < self.total:
            found |= {"start": self.start, "whole": self.total, "axis": axis}
        return found

    def divided(self, count: int, number: int) -> Heads:
        """Return the heads of worker `number` of the `count` of decode's that this shard serves."""
        return Heads(self.total, self.shard * count + number, self.shards * count)
