"""Blocks that are tiny for a data plane: where widths differ, each token slot of a page has a slice
for each rank.

An engine takes one block at a time, and each costs it the same, however few its bytes. Gathering
slices in staging, and separating them again, costs by the byte instead.
`kvflow bench transfer --tp 2:1` measures both. GB/s of a room as they are, and through staging, by
the bytes of a slice (one machine of two cores):

                   a block    256 B         1 KiB         4 KiB         16 KiB        64 KiB
    mooncake, TCP  20 us      0.02  0.63    0.07  0.81    0.27  1.19    1.03  1.25    1.54  1.37
    nixl, CMA      0.8 us     0.23  0.79    0.76  1.01    1.15  1.65    2.87  1.86    3.17  2.02
    nixl, TCP      1.7 us     0.10  0.49    0.30  0.66    0.43  0.85    1.04  0.95    0.57  1.54
"""

from __future__ import annotations

from kvflow.protocols.pages.arrange import Blocks

TINY_BELOW_BYTES = {"mooncake": 32 << 10, "nixl": 4 << 10, "ascend": 32 << 10, "mori": 4 << 10}
"""By plane: slices of fewer bytes on average go faster through staging.

`ascend` and `mori` have not run, and take the numbers of the planes whose calls are like theirs.
`local` copies slices as fast as any other way could.
"""


def are_tiny(plane: str, blocks: Blocks) -> bool:
    """Return True for slices that are worth gathering before this plane moves them."""
    return blocks.in_slices and blocks.mean_bytes < TINY_BELOW_BYTES.get(plane, 0)


def remedy(plane: str, blocks: Blocks) -> str:
    """Return a warning with advice, for slices that are tiny and are moved as they are."""
    return (
        f"slices of {blocks.mean_bytes} bytes are slow over {plane}, which is fast from "
        f"{TINY_BELOW_BYTES[plane]} on: where prefill has more shards, start decode with "
        "--disaggregation-prefill-tp (in the library, Staging(pool, shards=N)); where decode has "
        "more, give prefill a Staging"
    )
