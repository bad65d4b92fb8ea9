"""What only the ascend plane has, over a stub of its engine's calls."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import threading
from pathlib import Path

import pytest

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import LayoutError, MisuseError, TransferError
from kvflow.protocols.pages.layout import build_layout
from kvflow.testing.conformance.station import Side
from kvflow.transports.data import ascend
from kvflow.transports.data.ascend import AscendPlane, check_ascend, missing_for_ascend, npu_number
from kvflow.transports.data.select import open_plane
from tests.transports import stub_ascend
from tests.transports.stub_planes import Ascend


async def test_memory_is_given_back_by_a_thread_with_the_npus_context() -> None:
    side = Side(Ascend().open)
    assert isinstance(side.plane, AscendPlane)
    (engine,) = side.plane._engines
    assert len(engine.registered) == 1 + len(side.pool.layout.buffers)
    await side.close()
    assert not engine.registered


def test_the_device_is_set_before_the_engine_starts_in_each_thread() -> None:
    numbers: list[int] = []

    def set_device(number: int) -> None:
        numbers.append(number)
        stub_ascend.set_device(number)

    thread = threading.Thread(
        target=lambda: AscendPlane(
            device="3", make_engine=stub_ascend.TransferEngine, set_device=set_device
        )
    )
    thread.start()
    thread.join()
    assert numbers == [3]


def test_an_engine_that_does_not_start_is_told() -> None:
    with pytest.raises(TransferError, match="the ascend engine does not start on 127"):
        AscendPlane(make_engine=_Refusing, set_device=lambda number: None)


class _Refusing(stub_ascend.TransferEngine):
    def initialize(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str
    ) -> int:
        return -1


class _Full(stub_ascend.TransferEngine):
    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        return -1 if len(self.registered) >= 3 else super().register_memory(buffer_addr, capacity)


async def test_of_a_pool_that_cannot_be_registered_whole_nothing_stays_registered() -> None:
    """A peer that guesses an address could write there."""
    plane = AscendPlane(make_engine=_Full, set_device=stub_ascend.set_device)
    (engine,) = plane._engines
    before = dict(engine.registered)
    streams = [(name, "uint8", (8,)) for name in "abcd"]
    pool = PagedPool.allocate(
        build_layout(streams, page_size=4, num_pages=2, order="layer_first"), shared=False
    )
    with pytest.raises(LayoutError, match="ascend cannot register buffer"):
        plane.export(pool.layout)
    assert engine.registered == before
    await plane.close()
    pool.close()


def test_the_first_npu_is_taken_unless_another_is_named() -> None:
    assert [npu_number(device) for device in ("", "0", "128")] == [0, 0, 128]


@pytest.mark.parametrize("device", ["mlx5_0", "-1", "1.5", "4096", "²"])
def test_a_device_that_is_no_npus_number_is_refused(device: str) -> None:
    with pytest.raises(MisuseError, match="takes the number of an NPU, 0 by default"):
        open_plane("ascend", None, device=device)


def test_all_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ascend, "_HCCN", Path("/nowhere/hccn.conf"))
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert missing_for_ascend() == [
        "mooncake is not installed (pip install mooncake-transfer-engine-npu)",
        "torch_npu is not installed",
        "/nowhere/hccn.conf is not there (in a container, mount the host's)",
        "MC_FORCE_TCP is set, with which mooncake takes TCP",
    ]
    with pytest.raises(MisuseError, match="ascend data plane cannot be used here: mooncake is not"):
        open_plane("ascend", None)


def test_a_build_for_ascend_is_told_from_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "README").write_text("not built with AscendDirectTransport")
    (package / "engine.cpython-311.so").write_bytes(b"\x7fELF...TcpTransport...")
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(ascend, "_HCCN", package)
    specs = {
        "mooncake": importlib.util.spec_from_file_location("mooncake", package / "__init__.py")
    }
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specs.get(name, object()))
    assert missing_for_ascend() == [
        "this mooncake was built without USE_ASCEND_DIRECT (pip install "
        "mooncake-transfer-engine-npu, in place of it)"
    ]
    (package / "engine.cpython-311.so").write_bytes(b"\x7fELF...AscendDirectTransport...")
    assert missing_for_ascend() == []
    bare = importlib.machinery.ModuleSpec("mooncake", None)  # a package without an __init__.py
    bare.submodule_search_locations = [str(package)]
    specs["mooncake"] = bare
    assert missing_for_ascend() == []
    check_ascend("10.0.0.1")
    with pytest.raises(MisuseError, match="speaks IPv4 only"):
        check_ascend("fd00::1")
