"""kvflow moves the KV cache of a prompt from the machine that computed it to the machine that
generates from it.

nodes and rooms   PrefillNode, DecodeNode, PrefillRoom, DecodeRoom, Timing, Bounds
without asyncio   PrefillThread, DecodeThread, PrefillThreadRoom, DecodeThreadRoom, RoomEvent
finding prefills  RankInfo, RankTable, serve_ranks (prefill's side), RegistryClient (decode's)
pools             PagedPool, PageAllocator, ExternalPages, SharedSegment, SnapshotStore, Staging,
                  build_layout
hand-overs        HandOff, PackedArray
data planes       open_plane, LocalPlane, MooncakePlane, NixlPlane
errors            KvflowError and the subclasses that callers need to distinguish; Cause, Code

Each name is imported when it is first used: `import kvflow` alone loads neither numpy nor a socket
library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
    from kvflow.memory.allocator import PageAllocator
    from kvflow.memory.external import ExternalPages
    from kvflow.memory.pool import PagedPool
    from kvflow.memory.residency import Resident
    from kvflow.memory.shared import SharedSegment
    from kvflow.memory.snapshot import SnapshotStore
    from kvflow.memory.staging import Staging
    from kvflow.node import DecodeNode, PrefillNode
    from kvflow.node.handoff import HandOff
    from kvflow.node.packed_array import PackedArray
    from kvflow.node.threads.decode import DecodeThread
    from kvflow.node.threads.prefill import PrefillThread
    from kvflow.node.threads.rooms import DecodeThreadRoom, PrefillThreadRoom, RoomEvent
    from kvflow.protocols.errors import (
        AbortedError,
        CapacityError,
        Cause,
        Code,
        KvflowError,
        LayoutError,
        LostError,
        MisuseError,
        OwnershipError,
        PeerError,
        RefusedError,
        TransferError,
        WireError,
    )
    from kvflow.protocols.limits import Bounds, Timing
    from kvflow.protocols.pages.layout import Places, build_layout
    from kvflow.protocols.wire.ranks import RankInfo
    from kvflow.transports.control.rank_server import serve_ranks
    from kvflow.transports.control.registry import RankTable, RegistryClient
    from kvflow.transports.data.local import LocalPlane
    from kvflow.transports.data.mooncake.plane import MooncakePlane
    from kvflow.transports.data.nixl.plane import NixlPlane
    from kvflow.transports.data.select import open_plane

__version__ = "0.1.0"
__all__ = [
    "AbortedError",
    "Bounds",
    "CapacityError",
    "Cause",
    "Code",
    "DecodeNode",
    "DecodeRoom",
    "DecodeThread",
    "DecodeThreadRoom",
    "ExternalPages",
    "HandOff",
    "KvflowError",
    "LayoutError",
    "LocalPlane",
    "LostError",
    "MisuseError",
    "MooncakePlane",
    "NixlPlane",
    "OwnershipError",
    "PackedArray",
    "PageAllocator",
    "PagedPool",
    "PeerError",
    "Places",
    "PrefillNode",
    "PrefillRoom",
    "PrefillThread",
    "PrefillThreadRoom",
    "RankInfo",
    "RankTable",
    "RefusedError",
    "RegistryClient",
    "Resident",
    "RoomEvent",
    "SharedSegment",
    "SnapshotStore",
    "Staging",
    "Timing",
    "TransferError",
    "WireError",
    "build_layout",
    "open_plane",
    "serve_ranks",
]

# A table beside the imports above, because a type checker needs those and must not run them.
_ERRORS = "kvflow.protocols.errors"
_HOMES = {
    "AbortedError": _ERRORS,
    "Bounds": "kvflow.protocols.limits",
    "CapacityError": _ERRORS,
    "Cause": _ERRORS,
    "Code": _ERRORS,
    "DecodeNode": "kvflow.node",
    "DecodeRoom": "kvflow.handlers.rooms",
    "DecodeThread": "kvflow.node.threads.decode",
    "DecodeThreadRoom": "kvflow.node.threads.rooms",
    "ExternalPages": "kvflow.memory.external",
    "HandOff": "kvflow.node.handoff",
    "KvflowError": _ERRORS,
    "LayoutError": _ERRORS,
    "LocalPlane": "kvflow.transports.data.local",
    "LostError": _ERRORS,
    "MisuseError": _ERRORS,
    "MooncakePlane": "kvflow.transports.data.mooncake.plane",
    "NixlPlane": "kvflow.transports.data.nixl.plane",
    "OwnershipError": _ERRORS,
    "PackedArray": "kvflow.node.packed_array",
    "PageAllocator": "kvflow.memory.allocator",
    "PagedPool": "kvflow.memory.pool",
    "PeerError": _ERRORS,
    "Places": "kvflow.protocols.pages.layout",
    "PrefillNode": "kvflow.node",
    "PrefillRoom": "kvflow.handlers.rooms",
    "PrefillThread": "kvflow.node.threads.prefill",
    "PrefillThreadRoom": "kvflow.node.threads.rooms",
    "RankInfo": "kvflow.protocols.wire.ranks",
    "RankTable": "kvflow.transports.control.registry",
    "RefusedError": _ERRORS,
    "RegistryClient": "kvflow.transports.control.registry",
    "Resident": "kvflow.memory.residency",
    "RoomEvent": "kvflow.node.threads.rooms",
    "SharedSegment": "kvflow.memory.shared",
    "SnapshotStore": "kvflow.memory.snapshot",
    "Staging": "kvflow.memory.staging",
    "Timing": "kvflow.protocols.limits",
    "TransferError": _ERRORS,
    "WireError": _ERRORS,
    "build_layout": "kvflow.protocols.pages.layout",
    "open_plane": "kvflow.transports.data.select",
    "serve_ranks": "kvflow.transports.control.rank_server",
}

# With a visible `__getattr__`, a type checker would accept any name of the module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home, _, there = _HOMES.get(name, "").partition(":")
        if not home:
            raise AttributeError(f"module 'kvflow' has no attribute {name!r}")
        # The next use finds the name in the module and does not call this function.
        found = globals()[name] = getattr(import_module(home), there or name)
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
