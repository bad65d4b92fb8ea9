"""Planes of engines that are not here, over stubs of their calls, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping

from kvflow.memory.pool import PagedPool
from kvflow.protocols.ports import DataPlane
from kvflow.testing.conformance import Adapter
from kvflow.transports.data.ascend import AscendPlane
from kvflow.transports.data.mori import MoriPlane
from tests.transports import stub_ascend, stub_mori


class Mori(Adapter):
    name = "mori (stub)"
    death_is_proof = False

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return MoriPlane(self.host, rate_bytes_per_s, library=stub_mori)


class Ascend(Adapter):
    name = "ascend (stub)"
    death_is_proof = False

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return AscendPlane(
            self.host,
            rate_bytes_per_s,
            make_engine=stub_ascend.TransferEngine,
            set_device=stub_ascend.set_device,
        )

    def under_way(self, plane: DataPlane) -> Mapping[str, int]:
        assert isinstance(plane, AscendPlane)
        return {
            **plane.under_way,
            "engine's handles": sum(engine.open_handles for engine in plane._engines),
        }
