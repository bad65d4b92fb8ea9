"""Descriptors of the streams of a pool. Everything that a model keeps for a request is counted in
one of three units.

slot    once per token K and V, the latent of MLA, a sparse-attention indexer's keys, scales per
        token, a draft model's K and V
page    once per page        scales of a quantised page, summaries of a block
row     once per request     the state of conv, ssm and linear-attention layers

Streams with the unit slot or page are stored in pages of a pool, and streams with the unit row in
its rows. A stream whose dtype does not describe its bytes (packed 4-bit values, a swizzled
scale) is `uint8` with a `format`, which peers compare for equality. A new kind of state needs only
a new list of descriptors, and no new class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, SupportsIndex

from kvflow.protocols.errors import LayoutError

SLOT, PAGE, ROW = "slot", "page", "row"
UNITS = (SLOT, PAGE, ROW)
OPAQUE = "opaque"  # the dtype of every stream in an opaque pool
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
}


class StateKind(NamedTuple):
    """One stream: `shape` elements of `dtype` for each `unit`. For a part or a copy of a larger
    stream, the fields from `start` to `axis` are its `components.Part`. `space` is the name of the
    stream's space; without one, it is in the first space with pages, or with rows.
    """

    name: str
    dtype: str
    shape: Sequence[SupportsIndex]
    unit: str = SLOT
    format: str = ""
    start: SupportsIndex = 0
    whole: SupportsIndex = 0
    replica: SupportsIndex = 0
    replicas: SupportsIndex = 1
    axis: SupportsIndex = 0
    space: str = ""


def unit_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of one slot, page or row of a stream."""
    size = DTYPE_BYTES[dtype]
    for n in shape:
        size *= n
    return size


def check_kind(name: str, dtype: str, unit: str) -> None:
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise LayoutError(
            f"component {name!r}: unknown dtype {dtype!r}; use {known}, or make the pool opaque "
            "with a tag"
        )
    check_unit(name, unit)


def check_unit(name: str, unit: str) -> None:
    if unit not in UNITS:
        raise LayoutError(f"{name!r}: unknown unit {unit!r}; use {', '.join(UNITS)}")
