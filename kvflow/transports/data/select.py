"""Choice of a data plane, by name or for a pool."""

from __future__ import annotations

from collections.abc import Callable

from kvflow.memory.pool import PagedPool
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.ports import DataPlane
from kvflow.transports.data.ascend import AscendPlane, check_ascend, npu_number
from kvflow.transports.data.local import LocalPlane
from kvflow.transports.data.mooncake.plane import MooncakePlane, engine_class
from kvflow.transports.data.mori import MoriPlane, mori_library
from kvflow.transports.data.nixl.library import nixl_library
from kvflow.transports.data.nixl.plane import NixlPlane

_ENGINES: dict[str, Callable[[str, float | None, str], DataPlane]] = {
    "mooncake": MooncakePlane,
    "nixl": NixlPlane,
    "ascend": AscendPlane,
    "mori": MoriPlane,
}
PLANES = ("local", *_ENGINES)
_OWN: tuple[object, ...] = (LocalPlane, *_ENGINES.values())
# These planes have no fence: pages that a lost writer left in doubt stay in quarantine.
UNFENCED = ("ascend", "mori")


def check_plane(name: str, device: str = "", host: str = "") -> None:
    """Check what `open_plane` would check, before a pool exists. Raises: MisuseError."""
    if name not in PLANES:
        raise MisuseError(f"no data plane {name!r}; there are: {', '.join(PLANES)}")
    if name == "local" and device:
        raise MisuseError(f"RDMA device {device!r}: the local data plane has no use for one")
    if name == "mooncake":
        engine_class(host, force_tcp=not device)
    if name == "nixl":
        nixl_library()
    if name == "ascend":
        npu_number(device)
        check_ascend(host)
    if name == "mori":
        mori_library()


def open_plane(
    name: str,
    pool_segment: SharedSegment | None,
    rate_limit_bytes_per_s: float | None = None,
    host: str = "127.0.0.1",
    device: str = "",
) -> DataPlane:
    """Open one of `PLANES`.

    This takes some milliseconds (a back end may start threads and listen), so call it at start-up.
    `device` names the RDMA device for planes that use one; for ascend it is the number of an NPU.

    Raises: MisuseError for an unknown name, a rate not above 0, or a missing package, which the
    text names.
    """
    check_plane(name, device, host)
    if name == "local":
        return LocalPlane(pool_segment, rate_limit_bytes_per_s)
    return _ENGINES[name](host, rate_limit_bytes_per_s, device)


def plane_for(
    pool: PagedPool, plane: str | DataPlane, *, receives: bool, host: str = "127.0.0.1"
) -> DataPlane:
    """Return the data plane for a node over `pool`.

    `plane` is one of `PLANES`, or the caller's own plane, which is returned unchanged. With
    `receives`, peers write into this pool, so the local plane needs it in shared memory.

    Raises: the errors of `open_plane`, and MisuseError for a pool that the plane cannot use. No
    plane of `PLANES` takes a pool on a device, because it is not known there which status proves
    that a write has landed. A caller's own plane may reach one.
    """
    is_named = isinstance(plane, str) and plane in PLANES
    if not pool.on_host and (is_named or type(plane) in _OWN):
        name = plane if isinstance(plane, str) else plane.name
        raise MisuseError(
            f"plane {name!r}: {pool!r} is not in host memory, the only kind that this plane "
            "reaches: give the node a Staging"
        )
    if not isinstance(plane, str):
        return plane
    if plane == LocalPlane.name and receives and pool.segment is None:
        raise MisuseError(
            f"plane 'local': {pool!r} is not in shared memory, so no prefill can write into it; "
            "make it with PagedPool.allocate(layout), or over a SharedSegment with "
            "PagedPool.wrap(..., segment=segment)"
        )
    return open_plane(plane, pool.segment, host=host)
