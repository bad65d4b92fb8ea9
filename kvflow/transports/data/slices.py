"""Blocks that are tiny for a data plane: slices of token slots.

They arise when prefill and decode have different widths: each token slot of a page then has one
slice per rank. An engine takes some time for each block, and a tiny block takes as long as a larger
one. Gathering slices in staging, and separating them again, takes time per byte instead.

`kvflow bench transfer --tp 2:1` measures both. The table shows the time per block and, for each
slice size, the GB/s of a room without and with staging (on one machine with two cores):

                   a block    256 B         1 KiB         4 KiB         16 KiB        64 KiB
    mooncake, TCP  20 us      0.02  0.63    0.07  0.81    0.27  1.19    1.03  1.25    1.54  1.37
    nixl, CMA      0.8 us     0.23  0.79    0.76  1.01    1.15  1.65    2.87  1.86    3.17  2.02
    nixl, TCP      1.7 us     0.10  0.49    0.30  0.66    0.43  0.85    1.04  0.95    0.57  1.54
"""

from __future__ import annotations

from kvflow.protocols.pages.arrange import Blocks

TINY_BELOW_BYTES = {"mooncake": 32 << 10, "nixl": 4 << 10, "ascend": 32 << 10, "mori": 4 << 10}
"""For each plane, the mean slice size in bytes below which staging is faster.

`ascend` and `mori` have never run, and have the values of the planes whose calls resemble theirs.
`local` is absent: it copies slices as fast as staging could.
"""


def are_tiny(plane: str, blocks: Blocks) -> bool:
    """Return True if `blocks` are slices that should be gathered before this plane moves them."""
    return blocks.in_slices and blocks.mean_bytes < TINY_BELOW_BYTES.get(plane, 0)


def remedy(plane: str, blocks: Blocks) -> str:
    """Return a warning that slices are tiny, with advice on how to avoid them."""
    return (
        f"slices of {blocks.mean_bytes} bytes are slow over {plane}, which is fast from "
        f"{TINY_BELOW_BYTES[plane]} on: where prefill has more shards, start decode with "
        "--disaggregation-prefill-tp (in the library, Staging(pool, shards=N)); where decode has "
        "more, give prefill a Staging"
    )
