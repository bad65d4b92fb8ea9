"""Planes by name, and for a pool."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import kvflow
from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import MisuseError
from kvflow.transports.data.fake import FakeNetwork, FakePlane
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.nixl.library import MODULES
from kvflow.transports.data.select import PLANES, check_plane, open_plane, plane_for
from tests.memory.kinds import layout_of


def test_the_name_of_a_plane_is_checked() -> None:
    assert open_plane("local", None).name == "local"
    with pytest.raises(MisuseError, match="no data plane 'carrier pigeon'; there are: local, moon"):
        open_plane("carrier pigeon", None)
    with pytest.raises(MisuseError, match="rate limit"):
        open_plane("local", None, rate_limit_bytes_per_s=0)


def test_a_device_that_a_plane_does_not_use_is_refused() -> None:
    with pytest.raises(MisuseError, match="'mlx5_0': the local data plane has no use for one"):
        check_plane("local", "mlx5_0")


@pytest.mark.parametrize(
    ("plane", "modules", "text"),
    [
        ("mori", ("mori",), "mori is not installed: pip install amd_mori"),
        ("mooncake", ("mooncake.engine",), r"pip install 'kvflow\[mooncake\]'"),
        ("nixl", MODULES, r"nixl is not installed: pip install 'kvflow\[nixl\]'"),
    ],
)
def test_a_missing_package_says_what_to_install_before_there_is_a_pool(
    plane: str, modules: tuple[str, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    own = PagedPool.wrap({"k": np.zeros((2, 4, 3), np.float32)}, page_size=4)
    for ask in (lambda: check_plane(plane), lambda: plane_for(own, plane, receives=True)):
        with pytest.raises(MisuseError, match=text):
            ask()


def test_a_pool_that_receives_locally_lies_in_shared_memory() -> None:
    own = PagedPool.wrap({"k": np.zeros((2, 4, 3), np.float32)}, page_size=4)
    assert plane_for(own, "local", receives=False).name == "local"
    with pytest.raises(
        MisuseError, match=r"of 2 pages.*private> is not in shared.*segment=segment"
    ):
        plane_for(own, "local", receives=True)
    segment = SharedSegment.create(4096)
    inside = np.frombuffer(segment.memory, np.float32, 24).reshape(2, 4, 3)
    shared = PagedPool.wrap({"k": inside}, page_size=4, segment=segment)
    address, _ = plane_for(shared, "local", receives=True).export(shared.layout)
    assert address.locator == f"fd:{segment.fd}"
    segment.close()


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize("plane", PLANES)
def test_a_pool_on_a_device_needs_a_staging(plane: str, receives: bool) -> None:
    own = PagedPool.wrap({"k": np.zeros((2, 4, 3), np.float32)}, page_size=4)
    with pytest.raises(
        MisuseError,
        match=f"plane '{plane}': .* on meta> is not in host memory.*: give the node a Staging",
    ):
        plane_for(PagedPool(own.layout, device="meta"), plane, receives=receives)


@pytest.mark.parametrize("node", [kvflow.PrefillNode, kvflow.DecodeNode])
@pytest.mark.parametrize("plane", [LocalPlane.name, "mooncake"])
async def test_a_node_over_a_device_refuses_a_plane_of_ours_that_was_opened_before(
    plane: str, node: type[kvflow.PrefillNode | kvflow.DecodeNode]
) -> None:
    if plane == "mooncake":
        pytest.importorskip("mooncake.engine")
    opened = open_plane(plane, None)
    pool = PagedPool.allocate(layout_of("mha", 16, 64, 6, "layer_first"), device="meta")
    with pytest.raises(MisuseError, match="on meta> is not in host memory"):
        node(pool, opened)
    await opened.close()


class Reaching(LocalPlane):
    """A plane of the caller's, which derives from one of ours."""


def test_a_plane_of_the_callers_is_taken_as_it_is() -> None:
    pool = PagedPool.wrap({"k": np.zeros((2, 4, 3), np.float32)}, page_size=4)
    mine = FakePlane(FakeNetwork())
    assert plane_for(pool, mine, receives=True) is mine
    on_device = PagedPool(pool.layout, device="meta")
    for plane in (mine, Reaching(None)):
        assert plane_for(on_device, plane, receives=True) is plane
