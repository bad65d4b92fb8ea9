"""Which ranks of a prefill serve one rank of a decode.

Rank r of a decode takes its pages from rank r of a prefill, which has the same attention heads. If
the prefill has n times as many ranks, n of them together have these heads. If it has a pipeline,
every stage has other layers. To the nodes of kvflow all these are the ranks of one prefill. Only
the registry lists the ranks of all heads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from kvflow.protocols.errors import PeerError
from kvflow.protocols.wire.ranks import RankInfo

FIELD = "kvflow"  # the field of SGLang's PUT /route that describes a rank's node
SIZES = (
    "kvflow's backend needs the same --tp-size on both sides. Prefill may have a multiple, if "
    "KVFLOW_SGLANG_DECODE_TP_SIZE there names decode's, for a KV cache that is divided by head, "
    "without other state"
)
Resolve = Callable[[str], Awaitable[Sequence[RankInfo]]]


def listed(info: RankInfo, number: int, count: int) -> RankInfo:
    """Return the description of a rank as the registry lists it: as one of all `count` ranks of a
    prefill.
    """
    return msgspec.structs.replace(info, rank=number, world_size=count)


def counterpart(found: Sequence[RankInfo], rank: int, ranks: int) -> Sequence[RankInfo]:
    """Return the ranks of a prefill that serve rank number `rank` of a decode with `ranks` ranks.

    `found` are all ranks of the prefill, in order. Raises: PeerError if the heads cannot be shared
    by as many ranks as at decode.
    """
    count, rest = divmod(len(found), ranks)
    if rest:
        raise PeerError(
            f"prefill {found[0].control} has {len(found)} ranks, and this decode has {ranks}: "
            f"{SIZES}"
        )
    return [
        msgspec.structs.replace(info, rank=number, world_size=count)
        for number, info in enumerate(found[rank * count : (rank + 1) * count])
    ]


def resolver(resolve: Resolve, rank: int, ranks: int) -> Resolve:
    """Return a `resolve` for the node of rank number `rank` of a decode with `ranks` ranks."""

    async def found(prefill: str) -> Sequence[RankInfo]:
        return counterpart(await resolve(prefill), rank, ranks)

    return found
