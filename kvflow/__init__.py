"""kvflow moves the KV cache of a prompt from the machine that computed it to the machine that
generates from it.

nodes and rooms   PrefillNode, DecodeNode, PrefillRoom, DecodeRoom, Timing, Bounds
without asyncio   PrefillThread, DecodeThread, PrefillThreadRoom, DecodeThreadRoom, RoomEvent
finding prefills  RankInfo, RankTable, serve_ranks (prefill's side), RegistryClient (decode's)
pools             PagedPool, PageAllocator, ExternalPages, SharedSegment, SnapshotStore, Staging,
                  Resident, Space, SpaceStreams, build_layout
handoffs          HandOff, PackedArray
data planes       open_plane, LocalPlane, MooncakePlane, NixlPlane
errors            KvflowError and the subclasses that callers need to distinguish; Cause, Code

Each name is imported on first use, so `import kvflow` alone loads neither numpy nor a socket
library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvflow.handlers.rooms import DecodeRoom as DecodeRoom
    from kvflow.handlers.rooms import PrefillRoom as PrefillRoom
    from kvflow.memory.allocator import PageAllocator as PageAllocator
    from kvflow.memory.external import ExternalPages as ExternalPages
    from kvflow.memory.pool import PagedPool as PagedPool
    from kvflow.memory.residency import Resident as Resident
    from kvflow.memory.shared import SharedSegment as SharedSegment
    from kvflow.memory.snapshot import SnapshotStore as SnapshotStore
    from kvflow.memory.staging import Staging as Staging
    from kvflow.memory.streams import SpaceStreams as SpaceStreams
    from kvflow.node import DecodeNode as DecodeNode
    from kvflow.node import PrefillNode as PrefillNode
    from kvflow.node.handoff import HandOff as HandOff
    from kvflow.node.packed_array import PackedArray as PackedArray
    from kvflow.node.threads.decode import DecodeThread as DecodeThread
    from kvflow.node.threads.prefill import PrefillThread as PrefillThread
    from kvflow.node.threads.rooms import DecodeThreadRoom as DecodeThreadRoom
    from kvflow.node.threads.rooms import PrefillThreadRoom as PrefillThreadRoom
    from kvflow.node.threads.rooms import RoomEvent as RoomEvent
    from kvflow.protocols.errors import AbortedError as AbortedError
    from kvflow.protocols.errors import CapacityError as CapacityError
    from kvflow.protocols.errors import Cause as Cause
    from kvflow.protocols.errors import Code as Code
    from kvflow.protocols.errors import KvflowError as KvflowError
    from kvflow.protocols.errors import LayoutError as LayoutError
    from kvflow.protocols.errors import LostError as LostError
    from kvflow.protocols.errors import MisuseError as MisuseError
    from kvflow.protocols.errors import OwnershipError as OwnershipError
    from kvflow.protocols.errors import PeerError as PeerError
    from kvflow.protocols.errors import RefusedError as RefusedError
    from kvflow.protocols.errors import TransferError as TransferError
    from kvflow.protocols.errors import WireError as WireError
    from kvflow.protocols.limits import Bounds as Bounds
    from kvflow.protocols.limits import Timing as Timing
    from kvflow.protocols.pages.layout import build_layout as build_layout
    from kvflow.protocols.pages.spaces import Space as Space
    from kvflow.protocols.wire.ranks import RankInfo as RankInfo
    from kvflow.transports.control.rank_server import serve_ranks as serve_ranks
    from kvflow.transports.control.registry import RankTable as RankTable
    from kvflow.transports.control.registry import RegistryClient as RegistryClient
    from kvflow.transports.data.local import LocalPlane as LocalPlane
    from kvflow.transports.data.mooncake.plane import MooncakePlane as MooncakePlane
    from kvflow.transports.data.nixl.plane import NixlPlane as NixlPlane
    from kvflow.transports.data.select import open_plane as open_plane

__version__ = "0.1.0"

# The table repeats the imports above, which only a type checker reads.
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
    "Space": "kvflow.protocols.pages.spaces",
    "SpaceStreams": "kvflow.memory.streams",
    "Staging": "kvflow.memory.staging",
    "Timing": "kvflow.protocols.limits",
    "TransferError": _ERRORS,
    "WireError": _ERRORS,
    "build_layout": "kvflow.protocols.pages.layout",
    "open_plane": "kvflow.transports.data.select",
    "serve_ranks": "kvflow.transports.control.rank_server",
}
__all__ = list(_HOMES)

# If a type checker saw `__getattr__`, it would accept every attribute of the module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'kvflow' has no attribute {name!r}")
        # The name is stored in the module, so that its next use does not call this function.
        found = globals()[name] = getattr(import_module(home), name)
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
