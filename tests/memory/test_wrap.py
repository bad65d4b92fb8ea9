"""Pools over an engine's own arrays: numpy, torch, opaque pages, shared segments, misuse."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.arguments import pages_wanted
from kvflow.protocols.errors import LayoutError
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, build_layout
from kvflow.protocols.ports import WriteOutcome
from kvflow.transports.data.local import LocalPlane

KINDS: dict[str, Callable[[Any], Any]] = {"numpy": lambda array: array, "torch": torch.from_numpy}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Makes the kind of array under test from a numpy array, without a copy."""
    return KINDS[request.param]


def numbers(*pages: int) -> PageIndices:
    return np.array(pages, dtype=np.int32)


def counting(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_layer_first_arrays_are_a_buffer_each(kind: Callable[[Any], Any]) -> None:
    k, v = counting(6, 4, 2, 3), -counting(6, 4, 5)
    pool = PagedPool.wrap({"k": kind(k), "v": kind(v)}, page_size=4)
    assert [c.shape for c in pool.layout.components] == [(2, 3), (5,)]
    assert sorted(b.address for b in pool.layout.buffers) == sorted([k.ctypes.data, v.ctypes.data])
    for page in range(6):
        assert pool.pages_bytes(numbers(page)).tobytes() == k[page].tobytes() + v[page].tobytes()
    assert pool.on_host and pool.segment is None
    k[5] = 7  # the pool sees what the engine writes
    assert (pool.pages_bytes(numbers(5)).view(np.float32)[0, :24] == 7).all()


def test_views_into_one_page_first_array_share_a_buffer(kind: Callable[[Any], Any]) -> None:
    whole = counting(5, 3, 2, 4, 8)  # [page, layer, k/v, slot, dim]
    streams = {
        f"{layer}.{x}": kind(whole[:, layer, i]) for layer in range(3) for i, x in enumerate("kv")
    }
    pool = PagedPool.wrap(streams, page_size=4)
    (buffer,) = pool.layout.buffers
    assert (buffer.address, buffer.page_bytes) == (whole.ctypes.data, whole[0].nbytes)
    assert pool.pages_bytes(numbers(4, 1)).tobytes() == whole[[4, 1]].tobytes()


def test_a_part_of_each_page_stays_inside_the_memory(kind: Callable[[Any], Any]) -> None:
    whole = np.empty((5, 2, 4, 1, 8), np.float32)  # [page, k/v, slot, head, dim]; only v is given
    whole[:] = counting(*whole.shape)
    pool = PagedPool.wrap({"v": kind(whole)[:, 1]}, page_size=4)
    (buffer,) = pool.layout.buffers
    assert whole.ctypes.data <= buffer.address
    assert buffer.address + buffer.size_bytes <= whole.ctypes.data + whole.nbytes
    assert pool.pages_bytes(numbers(4)).tobytes() == whole[4, 1].tobytes()


def test_one_page_is_a_pool(kind: Callable[[Any], Any]) -> None:
    only = counting(1, 4, 8)
    assert (
        PagedPool.wrap({"k": kind(only)}, page_size=np.int64(4)).pages_bytes(numbers(0)).tobytes()
        == only.tobytes()
    )


def test_arrays_and_tensors_stand_for_each_other() -> None:
    array, tensor = counting(2, 4, 3), torch.ones(2, 4, 3, dtype=torch.bfloat16)
    pool = PagedPool.wrap({"a": array, "t": tensor}, page_size=4)
    assert pool.array("a") is array and pool.tensor("t") is tensor
    pool.tensor("a")[1] = 5
    assert (array[1] == 5).all()
    # The bits of 1.0.
    assert pool.array("t").dtype == np.uint16 and (pool.array("t") == 0x3F80).all()
    pool.close()
    for view_of in (pool.array, pool.tensor):
        with pytest.raises(LayoutError, match="closed"):
            view_of("a")


F32 = np.float32


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, "at least one array"),
        ([np.zeros((4, 4, 2), F32)], "from a mapping of stream names to arrays, not from a list"),
        (np.zeros((4, 4, 2), F32), "not from a ndarray"),
        ({"k": [[1.0]]}, "'k' is a list, neither a numpy array nor a torch tensor"),
        (
            {"k": np.zeros((4, 3, 2), F32)},
            r"'k': shape \(4, 3, 2\) is not .* with a page_size of 4",
        ),
        ({"k": np.zeros(4, F32)}, r"'k': shape \(4,\) is not \[num_pages, page_size, ...\]"),
        ({"k": np.zeros((0, 4, 2), F32)}, "at least one element"),
        (
            {"k": np.zeros((4, 4, 2), F32), "v": np.zeros((5, 4, 2), F32)},
            "'v' has 5 pages, 'k' has 4",
        ),
        (
            {"k": np.zeros((4, 2, 4), F32).transpose(0, 2, 1)},
            "'k': one page of it is not contiguous",
        ),
        ({"k": np.zeros((4, 4, 4), F32)[:, :, ::2]}, "'k': one page of it is not contiguous"),
        ({"k": np.zeros((4, 4, 2), F32)[::-1]}, "'k': pages of 32 bytes overlap, -32 bytes apart"),
        ({"k": np.broadcast_to(np.zeros((1, 4, 2), F32), (4, 4, 2))}, "'k' is read-only"),
        (
            {"k": torch.zeros(1, 4, 2).expand(4, 4, 2)},
            "'k': pages of 32 bytes overlap, 0 bytes apart",
        ),
        (
            {"k": np.zeros((4, 4, 2))},
            "unknown dtype 'float64'; use float32, .*or make the pool opaque with a tag",
        ),
        ({"k": torch.zeros(4, 4, 2, dtype=torch.float64)}, "unknown dtype 'float64'"),
        ({"k": np.zeros((4, 4, 2), ">f4")}, "byte order"),
        ({"k": np.zeros((4, 4, 2), object)}, "plain numbers"),
        ({"k": torch.zeros(4, 4, 2, device="meta")}, "torch.strided on meta"),
        ({"k": torch.zeros(4, 4, 2).to_sparse()}, "sparse_coo on cpu"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(arrays: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        PagedPool.wrap(arrays, page_size=4)


def test_what_the_bytes_of_a_stream_mean_is_kept_with_it() -> None:
    given = {"k": np.zeros((4, 4, 2), np.uint8), "v": np.zeros((4, 4, 2), np.uint8)}
    pool = PagedPool.wrap(given, page_size=4, formats={"v": "nvfp4"})
    assert {c.name: c.format for c in pool.layout.components} == {"k": "", "v": "nvfp4"}


STATES = np.zeros((3, 5), F32)


def test_a_pool_of_nothing_but_rows_has_the_pages_it_is_given() -> None:
    pool = PagedPool.wrap({}, page_size=4, rows={"ssm": STATES}, num_pages=np.int64(40))
    assert (pool.layout.num_pages, pool.layout.num_rows, pool.layout.page_bytes) == (40, 3, 0)
    assert pages_wanted(pool.layout, 160, 0) == (40, 1) and pool.pages.free_pages == 40


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tensors": {}, "rows": {"ssm": STATES}}, "a pool of nothing but rows needs num_pages"),
        (
            {"tensors": {}, "rows": {"ssm": STATES}, "num_pages": 0},
            "num_pages 0: a pool has at least one page",
        ),
        ({"tensors": {}, "rows": {"ssm": STATES}, "num_pages": "4"}, "num_pages '4'"),
        ({"num_pages": 4}, "num_pages is for pools of nothing but rows: stream 'k' has pages"),
        ({"formats": {"k": 5}}, "stream 'k': its format is a int, not a str"),
        ({"formats": {"v": "e4m3"}}, "formats names 'v', which is no stream of the pool"),
        ({"parts": {"v": {"start": 1}}}, "parts names 'v', which is no stream of the pool"),
    ],
)
def test_rows_and_formats_that_cannot_be_described_are_refused(given: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        PagedPool.wrap(**{"tensors": {"k": np.zeros((4, 4, 2), F32)}, "page_size": 4, **given})


@pytest.mark.parametrize("page_size", [0, -1, 65537, 1.5, "4", None])
def test_page_sizes_are_checked(page_size: Any) -> None:
    with pytest.raises(LayoutError, match=f"page_size {page_size!r}"):
        PagedPool.wrap({"k": np.zeros((4, 4, 2), F32)}, page_size=page_size)


def test_no_byte_is_given_twice(kind: Callable[[Any], Any]) -> None:
    memory = kind(counting(4, 4, 2))
    with pytest.raises(LayoutError, match="'k' and 'v' share bytes"):
        PagedPool.wrap({"k": memory, "v": memory}, page_size=4)


def test_pages_that_leave_their_allocation_are_refused() -> None:
    """The memory between the views is somebody else's."""
    memory = np.zeros((64, 1), F32)
    strided = np.lib.stride_tricks.as_strided(memory[:8], shape=(3, 2, 4), strides=(96, 16, 4))
    assert PagedPool.wrap({"k": strided[:2]}, page_size=2).layout.num_pages == 2
    with pytest.raises(LayoutError, match="288 bytes of pages leave its allocation of 256 bytes"):
        PagedPool.wrap({"k": strided}, page_size=2)


# --- opaque pages


def test_opaque_pages_may_have_any_inner_layout(kind: Callable[[Any], Any]) -> None:
    heads_first = counting(3, 2, 16, 4)  # [page, head, slot, dim]
    as_engines_show_it = kind(
        heads_first.transpose(0, 2, 1, 3)
    )  # [page, slot, head, dim]: one page is not C-contiguous
    with pytest.raises(LayoutError, match="not contiguous"):
        PagedPool.wrap({"k": as_engines_show_it}, page_size=16)
    pool = PagedPool.wrap({"k": as_engines_show_it}, page_size=16, tag="HND")
    (component,) = pool.layout.components
    assert (component.dtype, component.shape) == ("opaque", (512,)) and pool.layout.page_size == 16
    assert pool.pages_bytes(numbers(2)).tobytes() == heads_first[2].tobytes()
    assert pool.tensor("k").shape == pool.array("k").shape == (3, 16, 2, 4)


def test_opaque_pools_keep_their_streams_in_the_order_given() -> None:
    memory = counting(3, 2, 5)
    given = {"second": memory[:, 1], "first": memory[:, 0]}
    pool = PagedPool.wrap(given, page_size=7, tag="t", fingerprint="llama bf16 tp1")
    assert [c.name for c in pool.layout.components] == ["second", "first"]
    assert (pool.layout.tag, pool.layout.fingerprint) == ("t", "llama bf16 tp1")
    assert differences(pool.layout, PagedPool.wrap(given, page_size=7, tag="u").layout)[1] == (
        "page tag: prefill 't', decode 'u'"
    )


def test_opaque_pages_may_have_gaps_between_them_but_not_inside() -> None:
    memory = counting(3, 8)
    assert PagedPool.wrap({"k": memory[:, :6]}, page_size=7, tag="t").layout.page_bytes == 24
    with pytest.raises(LayoutError, match="not contiguous"):
        PagedPool.wrap({"k": memory[:, ::2]}, page_size=7, tag="t")


# --- memory in a shared segment


def in_segment(segment: SharedSegment, kind: Callable[[Any], Any]) -> dict[str, Any]:
    found = np.frombuffer(segment.memory, dtype=np.float32, count=2 * 8 * 4 * 2).reshape(2, 8, 4, 2)
    return {"k": kind(found[0]), "v": kind(found[1])}


async def test_an_engines_memory_in_a_segment_is_written_into_by_peers(
    kind: Callable[[Any], Any],
) -> None:
    segment = SharedSegment.create(1 << 16)
    mine = in_segment(segment, kind)
    target = PagedPool.wrap(mine, page_size=4, segment=segment)
    assert target.segment is segment
    source = PagedPool.wrap({"k": counting(8, 4, 2), "v": -counting(8, 4, 2)}, page_size=4)
    planes = LocalPlane(source.segment), LocalPlane(target.segment)
    planes[0].export(source.layout)
    route = await planes[0].connect(*planes[1].export(target.layout))
    assert (
        await asyncio.shield(route.write(numbers(6, 7), numbers(0, 3)).done) is WriteOutcome.LANDED
    )
    assert (np.asarray(mine["v"])[[0, 3]] == -counting(8, 4, 2)[[6, 7]]).all()
    assert not np.asarray(mine["k"])[1].any()
    for plane in planes:
        await plane.close()
    target.close()
    assert segment.fd >= 0  # the engine's memory outlives the pool
    segment.close()
    assert target.segment is None


def test_memory_outside_the_segment_is_refused(kind: Callable[[Any], Any]) -> None:
    segment = SharedSegment.create(1 << 16)
    arrays = {**in_segment(segment, kind), "elsewhere": kind(counting(8, 4, 2))}
    with pytest.raises(
        LayoutError, match=f"'elsewhere' does not lie in .* descriptor {segment.fd}"
    ):
        PagedPool.wrap(arrays, page_size=4, segment=segment)
    segment.close()


def test_a_segment_that_peers_cannot_open_is_refused() -> None:
    segment = SharedSegment.private(1 << 16)
    with pytest.raises(
        LayoutError, match=r"cannot be opened by a peer: make it with SharedSegment\.create"
    ):
        PagedPool.wrap(in_segment(segment, KINDS["numpy"]), page_size=4, segment=segment)


# --- the books that live with a pool


def small() -> PoolLayout:
    return build_layout([("k", "uint8", (2,))], page_size=4, num_pages=8)


def test_a_pool_keeps_its_own_books() -> None:
    pool = PagedPool.allocate(small(), shared=False)
    assert (pool.unproven, pool.pages.num_pages) == ([], 8)
    assert pool.places is pool.pages and pool.pages.at_rest()


def test_pools_say_what_they_are() -> None:
    pool = PagedPool.allocate(small())
    assert repr(pool) == "<PagedPool of 8 pages, 4 tokens and 8 bytes each, in 1 streams, shared>"
    pool.close()
    assert repr(pool).endswith("closed>")
    mine = PagedPool.wrap({"k": counting(2, 3), "v": counting(2, 3)}, page_size=5, tag="t")
    assert (
        repr(mine)
        == "<PagedPool of 2 pages, 5 tokens and 24 bytes each, in 2 streams, tag 't', private>"
    )


def test_pools_need_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from kvflow.memory.pool import PagedPool\n"
        "from kvflow.protocols.errors import MisuseError\n"
        "from kvflow.protocols.pages.layout import build_layout\n"
        "pool = PagedPool.wrap({'k': np.ones((2, 4, 3), np.float32)}, page_size=4)\n"
        "made = PagedPool.allocate(build_layout([('k', 'bfloat16', (3,))], page_size=4, "
        "num_pages=2))\n"
        "made.array('k')[1] = 1\n"
        "assert made.pages_bytes([1]).sum() == 12 and pool.array('k').sum() == 24\n"
        "try: pool.tensor('k')\n"
        "except MisuseError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.startswith("PagedPool.tensor needs torch, which is not installed")


def test_arrays_may_be_parts_of_what_ranks_have_together() -> None:
    arrays = {name: np.zeros((4, 2, 4, 8), np.uint8) for name in ("k", "v")}
    latent = np.zeros((4, 2, 16), np.uint8)
    parts: dict[str, Any] = {name: {"start": np.int64(4), "whole": 8} for name in arrays}
    parts["latent"] = {"replica": 1, "replicas": 2}
    pool = PagedPool.wrap({**arrays, "latent": latent}, 2, parts=parts)
    assert [c.label for c in pool.layout.components] == [
        "k[4:8 of 8]",
        "v[4:8 of 8]",
        "latent (copy 1 of 2)",
    ]
    assert pool.array("k") is pool.array("k", start=4, replica=0) is arrays["k"]
    for given, text in (
        ({"x": {}}, "parts names 'x', which is no stream"),
        (
            {"k": {"begin": 1}},
            "stream 'k': its part {'begin': 1} is not a mapping with some of start, whole",
        ),
        ({"k": [4, 8]}, r"its part \[4, 8\] is not a mapping"),
        ({"k": {"start": "4"}}, "stream 'k': start '4' is not an integer"),
        ({"k": {"start": 5, "whole": 8}}, "entries 5..9 are not within its whole of 8"),
    ):
        with pytest.raises(LayoutError, match=text):
            PagedPool.wrap(arrays, 2, parts=given)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="an opaque pool has no parts"):
        PagedPool.wrap({"k": arrays["k"]}, 2, tag="mine", parts={"k": {"start": 4, "whole": 8}})


def test_several_parts_of_one_name_are_told_apart_by_their_start_and_copy() -> None:
    heads = StateKind("k", "uint8", (2, 8), whole=4)
    kinds = [heads, heads._replace(start=2), StateKind("latent", "uint8", (3,), replicas=2)]
    pool = PagedPool.allocate(
        build_layout([*kinds, kinds[2]._replace(replica=1)], page_size=2, num_pages=4), shared=False
    )
    pool.array("k", start=2)[...] = 7
    assert pool.tensor("k", start=2).eq(7).all() and not pool.array("k", start=0).any()
    assert pool.tensor("k", start=2) is pool.tensor("k", start=2)
    assert (
        pool.array("latent", replica=1).ctypes.data != pool.array("latent", replica=0).ctypes.data
    )
    with pytest.raises(
        LayoutError,
        match=r"'k': start None and replica None are those of 2 components.*k\[2:4 of 4\]",
    ):
        pool.array("k")
    with pytest.raises(LayoutError, match=r"2 of 4\], k\[2:4 of 4\]\)?$"):
        pool.array("k")
    with pytest.raises(LayoutError, match="start 1 and replica None are those of 0 components"):
        pool.tensor("k", start=1)
    pool.close()


def test_a_name_of_two_units_is_refused() -> None:
    with pytest.raises(LayoutError, match="stream 'k' is named twice"):
        PagedPool.wrap(
            {"k": np.zeros((4, 2, 8), F32)}, page_size=2, rows={"k": np.zeros((3, 8), F32)}
        )


def test_pages_of_one_slot_are_pages_like_others() -> None:
    memory = np.zeros((4, 1, 8), np.uint8)
    assert PagedPool.wrap({"k": memory}, page_size=1).layout.num_pages == 4
    overlapping = np.lib.stride_tricks.as_strided(memory, strides=(4, 8, 1))
    with pytest.raises(LayoutError, match="'k': pages of 8 bytes overlap, 4 bytes apart"):
        PagedPool.wrap({"k": overlapping}, page_size=1)
