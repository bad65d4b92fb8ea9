"""Entries of the bootstrap registry: the address and the incarnation of every rank of a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvflow.protocols.errors import LostError, MisuseError, PeerError, WireError
from kvflow.protocols.wire.messages import MAX_RANKS


class PoolShape(msgspec.Struct, frozen=True):
    """The sizes of a pool, for display only. When decode registers, prefill compares all of the
    layout.
    """

    page_size: int = 0
    num_pages: int = 0
    page_bytes: int = 0
    components: int = 0


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one prefill. `control` is its address, "tcp://host:port". The rank draws a new
    `incarnation` at every start.

    A data-parallel prefill has `dp_size` groups of `world_size` ranks each. One group serves each
    request.
    """

    rank: int
    world_size: int
    incarnation: int
    control: str
    backend: str
    model: str
    pool: PoolShape = PoolShape()
    dp_rank: int = 0
    dp_size: int = 1


class DpRankError(MisuseError):
    """Raised when a room names a group that its prefill does not have."""

    def __init__(self, dp_rank: int, first: RankInfo) -> None:
        super().__init__(
            f"dp_rank {dp_rank} is outside 0..{first.dp_size - 1}, the groups of prefill "
            f"{first.control}"
        )


def check_infos(ranks: object, what: str) -> Sequence[RankInfo]:
    """Check a list of ranks from a user or a resolver, and return it. Raises: MisuseError."""
    if isinstance(ranks, Sequence) and all(isinstance(info, RankInfo) for info in ranks):
        return ranks
    raise MisuseError(f"{what} must be a list of kvflow.RankInfo, not {ranks!r:.200}")


def check_dp_rank(dp_rank: object) -> None:
    """Check the number of a group, or None, from a user. Raises: MisuseError."""
    # In Python, a bool is an int, and would silently mean group 0 or 1.
    if dp_rank is not None and (not isinstance(dp_rank, int) or isinstance(dp_rank, bool)):
        raise MisuseError(f"dp_rank {dp_rank!r} is not the number of a group")


def group_for(
    ranks: Sequence[RankInfo], room: int, dp_rank: int | None = None
) -> Sequence[RankInfo]:
    """Return the ranks that serve a room, out of all ranks of a prefill.

    They are group `dp_rank`, or by default group `room % dp_size`, which the router and both halves
    compute in the same way. If `dp_rank` is None and all of `ranks` belong to one group, the caller
    has already chosen it.

    Raises: DpRankError for a group that does not exist, LostError if no rank of the group is known.
    """
    size = ranks[0].dp_size if ranks else 1
    if dp_rank is not None and not 0 <= dp_rank < size:
        raise DpRankError(dp_rank, ranks[0])
    if size == 1 or (dp_rank is None and len({info.dp_rank for info in ranks}) == 1):
        return ranks
    wanted = room % size if dp_rank is None else dp_rank
    found = [info for info in ranks if info.dp_rank == wanted]
    if not found:
        raise LostError(f"no rank of group {wanted} of prefill {ranks[0].control} is known")
    return found


def groups_to_tell(
    ranks: Sequence[RankInfo], room: int, dp_rank: int | None
) -> list[Sequence[RankInfo]]:
    """Return the groups at which the other half of a refused room may wait: the group that serves
    the room, or all known groups if no such group exists. Raises: LostError if the group exists,
    but none of its ranks is known.
    """
    try:
        return [group_for(ranks, room, dp_rank)]
    except DpRankError:
        known = sorted({info.dp_rank for info in ranks})
        return [group_for(ranks, room, group) for group in known]


def check_ranks(ranks: Sequence[RankInfo]) -> None:
    """Check that `ranks` are every rank of one group, each once. Raises: PeerError."""
    first, size = ranks[0], ranks[0].world_size
    if len(ranks) != size:
        given = "1 rank is" if len(ranks) == 1 else f"{len(ranks)} ranks are"
        raise PeerError(f"prefill {first.control} has world_size {size}, and {given} given")
    seen = set()
    for info in ranks:
        if (info.dp_rank, info.dp_size) != (first.dp_rank, first.dp_size):
            mine, theirs = (f"group {each.dp_rank} of {each.dp_size}" for each in (info, first))
            raise PeerError(f"prefill {info.control} is of {mine}, and {first.control} of {theirs}")
        if info.world_size != size:
            raise PeerError(
                f"prefill {info.control} has world_size {info.world_size}, and {first.control} has "
                f"{size}"
            )
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
    dp_rank: int = 0
    dp_size: int = 1


def rank_to_json(info: RankInfo) -> dict[str, Any]:
    """Return a rank as a JSON object, with its incarnation as hex digits."""
    # Many JSON readers keep numbers as doubles, which cannot hold every u64.
    return {
        **msgspec.structs.asdict(info),
        "incarnation": f"{info.incarnation:016x}",
        "pool": msgspec.to_builtins(info.pool),
    }


def rank_from_json(value: object) -> RankInfo:
    """Parse the JSON object of a rank from another process. Raises: WireError naming the field."""
    try:
        seen = msgspec.convert(value, _RankJson)
        incarnation = int(seen.incarnation, 16)
    except (msgspec.ValidationError, ValueError) as error:
        raise WireError(f"rank: {error}") from None
    if not 0 <= seen.rank < seen.world_size <= MAX_RANKS:
        raise WireError(f"rank: {seen.rank} of {seen.world_size} is outside 0..{MAX_RANKS}")
    if not 0 <= seen.dp_rank < seen.dp_size <= MAX_RANKS:
        raise WireError(f"rank: dp_rank {seen.dp_rank} of {seen.dp_size} is outside 0..{MAX_RANKS}")
    if not 0 <= incarnation < 1 << 64:
        raise WireError("rank: incarnation is no u64")
    if not seen.control.startswith("tcp://"):
        raise WireError(f"rank: control endpoint {seen.control[:80]!r} is no tcp:// address")
    fields = {name: getattr(seen, name) for name in RankInfo.__struct_fields__}
    return RankInfo(**fields | {"incarnation": incarnation})
