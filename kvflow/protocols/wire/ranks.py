"""What the bootstrap registry knows: which rank of a prefill serves where, and which life of it that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvflow.protocols.errors import PeerError, WireError
from kvflow.protocols.wire.messages import MAX_RANKS


class PoolShape(msgspec.Struct, frozen=True):
    """The pool in a line, for people and dashboards; peers compare the whole layout when they register."""

    page_size: int = 0
    num_pages: int = 0
    page_bytes: int = 0
    components: int = 0


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one prefill. `control` is its "tcp://host:port"; `incarnation` is drawn anew at every start."""

    rank: int
    world_size: int
    incarnation: int
    control: str
    backend: str
    model: str
    pool: PoolShape = PoolShape()


def check_ranks(ranks: Sequence[RankInfo]) -> None:
    """Every rank of one prefill, each once; in any order. Raises: PeerError naming what does not fit."""
    first, size = ranks[0], ranks[0].world_size
    if len(ranks) != size:
        given = "1 rank is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
        raise PeerError(f"prefill {first.control} has world_size {size}, and {given} given")
    seen = set()
    for info in ranks:
        if info.world_size != size:
            raise PeerError(f"prefill {info.control} has world_size {info.world_size}, and {first.control} has {size}")
        if not 0 <= info.rank < size:
            raise PeerError(f"prefill {info.control}: rank {info.rank} is outside 0..{size - 1}")
        if info.rank in seen:
            raise PeerError(f"prefill {info.control}: rank {info.rank} is given twice")
        seen.add(info.rank)


class _RankJson(msgspec.Struct, frozen=True):
    rank: int
    world_size: int
    incarnation: str
    control: str
    backend: str
    model: str
    pool: PoolShape = PoolShape()


def rank_to_json(info: RankInfo) -> dict[str, Any]:
    """JSON cannot carry a u64, so the incarnation travels as hex digits."""
    return {
        **msgspec.structs.asdict(info),
        "incarnation": f"{info.incarnation:016x}",
        "pool": msgspec.to_builtins(info.pool),
    }


def rank_from_json(value: object) -> RankInfo:
    """The rank somebody announced, checked.

    Raises: WireError naming the field.
    """
    try:
        seen = msgspec.convert(value, _RankJson)
        incarnation = int(seen.incarnation, 16)
    except (msgspec.ValidationError, ValueError) as error:
        raise WireError(f"rank: {error}") from None
    if not 0 <= seen.rank < seen.world_size <= MAX_RANKS:
        raise WireError(f"rank: {seen.rank} of {seen.world_size} is outside 0..{MAX_RANKS}")
    if not 0 <= incarnation < 1 << 64:
        raise WireError("rank: incarnation is no u64")
    if not seen.control.startswith("tcp://"):
        raise WireError(f"rank: control endpoint {seen.control[:80]!r} is no tcp:// address")
    return RankInfo(seen.rank, seen.world_size, incarnation, seen.control, seen.backend, seen.model, seen.pool)
