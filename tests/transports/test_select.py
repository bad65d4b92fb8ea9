"""Planes by name, and for a pool."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import MisuseError
from kvflow.transports.data.fake import FakeNetwork, FakePlane
from kvflow.transports.data.nixl.library import MODULES
from kvflow.transports.data.select import check_plane, open_plane, plane_for


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


def test_a_pool_on_a_device_is_not_copied_by_the_cpu() -> None:
    own = PagedPool.wrap({"k": np.zeros((2, 4, 3), np.float32)}, page_size=4)
    with pytest.raises(MisuseError, match="not in host memory"):
        plane_for(PagedPool(own.layout, device="cuda:0"), "local", receives=False)


def test_a_plane_of_the_callers_is_taken_as_it_is() -> None:
    pool = PagedPool.wrap({"k": np.zeros((2, 4, 3), np.float32)}, page_size=4)
    mine = FakePlane(FakeNetwork())
    assert plane_for(pool, mine, receives=True) is mine
