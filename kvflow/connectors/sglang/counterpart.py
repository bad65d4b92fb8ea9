"""Which ranks of a prefill serve one rank of a decode.

Rank r of a decode takes its pages from rank r of a prefill, which has the same attention heads. So
each pair of ranks is a prefill of one rank to the nodes of kvflow. Only the registry lists all of
them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from kvflow.protocols.errors import PeerError
from kvflow.protocols.wire.ranks import RankInfo

FIELD = "kvflow"  # the field of SGLang's PUT /route that describes a rank's node
Resolve = Callable[[str], Awaitable[Sequence[RankInfo]]]


def listed(info: RankInfo, rank: int, ranks: int) -> RankInfo:
    """Return a node's description as the registry lists it: number `rank` of `ranks`."""
    return msgspec.structs.replace(info, rank=rank, world_size=ranks)


def counterpart(found: Sequence[RankInfo], rank: int, ranks: int) -> Sequence[RankInfo]:
    """Return the rank of a prefill that serves rank number `rank` of a decode with `ranks` ranks.

    `found` are all ranks of the prefill, in order. Raises: PeerError if it has another number of
    ranks.
    """
    if len(found) != ranks:
        raise PeerError(
            f"prefill {found[0].control} has {len(found)} tensor-parallel ranks, and this decode "
            f"has {ranks}: kvflow's backend needs the same --tp-size on both sides"
        )
    return [msgspec.structs.replace(found[rank], rank=0, world_size=1)]


def resolver(resolve: Resolve, rank: int, ranks: int) -> Resolve:
    """Return a `resolve` for the node of rank number `rank` of a decode with `ranks` ranks."""

    async def found(prefill: str) -> Sequence[RankInfo]:
        return counterpart(await resolve(prefill), rank, ranks)

    return found
