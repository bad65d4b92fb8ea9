"""A shelf of shipped endpoints, which stores each under a number and restores it.

The key of an endpoint is its object graph as a hashable value. It omits attributes that affect no
step (`LEFT_OUT`). It also omits times: every event of the walk happens at 0, every deadline is far
away, and the walk makes a timer due just before it expires. Of the endpoints with equal keys the
shelf keeps the first, pickled, and `take` restores it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from kvflow.protocols.commands import PeerKey
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity, PrefillPeer
from kvflow.protocols.earlier import EarlierWriter
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machinery import Deadlines, Story
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.wire.ranks import RankInfo

FAR = 1e9
"""The time of every deadline that the walk has not made due."""
FIRST = Cause(Code.CLIENT_GONE, "first")
"""Replaces the cause of each failed room after a step, so that a later change of the cause shows.
No step depends on a cause.
"""

LEFT_OUT = frozenset(
    {
        # These are the same in every endpoint, or empty.
        *("observer", "timing", "bounds", "verify", "staged", "outbox"),
        *("_timing", "_bounds", "_outbox", "layout", "_layout", "served", "_served", "coverage"),
        # Times, which the walk sets itself, and the stories and reports of rooms.
        *("received_at_s", "sent_at_s", "tried_at_s", "used_at_s", "opened_at_s", "ready_at_s"),
        *("moving_at_s", "progress_at_s", "deadline_at_s", "recalled_at_s", "cancelled_at_s"),
        *("repeat_after_s", "resync_after_s", "forget_at_s", "story", "report"),
        *("_serial", "_write"),
        # The walk does not cover admission.
        *("overdue", "quarantine_limit"),
        *("_count", "_limit", "handoff", "packed_pages", "checksum", "error"),
    }
)

E_ = TypeVar("E_", bound=DecodeEndpoint | PrefillEndpoint)
_ATOMS = frozenset({int, str, bytes, bool, float, type(None)})


class Shelf(Generic[E_]):
    """Every endpoint that the walk met, by number."""

    def __init__(self, tidy: Callable[[E_], None], shared: list[Any]) -> None:
        """Create an empty shelf.

        `tidy` resets whatever may differ between endpoints with equal keys. `shared` lists objects
        that all endpoints refer to and no step changes. They are not pickled.
        """
        self._tidy: Callable[[E_], None] = tidy
        self._names = {id(thing): n for n, thing in enumerate(shared)}
        self._shared = shared
        self._numbers: dict[Hashable, int] = {}
        self._pickled: list[bytes] = []

    def __len__(self) -> int:
        return len(self._pickled)

    def put(self, endpoint: E_) -> int:
        """Tidy and store `endpoint`, and return its number. Read its commands before this call."""
        self._tidy(endpoint)
        key = freeze(endpoint, {})
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self._pickled)
            stream = io.BytesIO()
            _Pickler(stream, self._names).dump(endpoint)
            self._pickled.append(stream.getvalue())
        return found

    def take(self, number: int) -> E_:
        endpoint: E_ = _Unpickler(io.BytesIO(self._pickled[number]), self._shared).load()
        return endpoint


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, names: dict[int, int]) -> None:
        super().__init__(stream, protocol=5)
        self._names = names

    def persistent_id(self, thing: Any) -> int | None:
        return self._names.get(id(thing))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(stream)
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared[number]


Way = Callable[[Any, dict[int, int]], Hashable]
# A walk freezes millions of values, so the function that freezes a type is chosen only once.
_WAYS: dict[type, Way] = {}


def freeze(value: Any, seen: dict[int, int]) -> Hashable:
    """Return the object graph below `value` as a hashable value. `seen` numbers its objects."""
    kind = type(value)
    if kind in _ATOMS:
        return value  # type: ignore[no-any-return]
    way = _WAYS.get(kind)
    if way is None:
        way = _WAYS[kind] = _way_of(value)
    return way(value, seen)


def _way_of(value: Any) -> Way:
    kind = type(value)
    # No step depends on a cause, so all causes have one value.
    if kind is Cause:
        return lambda value, seen: "cause"
    if issubclass(kind, Enum) or kind in (RankInfo, PlaneAddress, PeerKey):
        return lambda value, seen: value
    if kind is np.ndarray:
        return lambda value, seen: tuple(value.tolist())
    if kind is Deadlines:
        return lambda value, seen: tuple(sorted(map(repr, value)))
    if kind is PrefillIdentity or kind is DecodeIdentity:
        return lambda value, seen: value.incarnation
    if issubclass(kind, msgspec.Struct):
        names = [name for name in kind.__struct_fields__ if name not in LEFT_OUT]
        fields = _getter(names)
        return lambda value, seen: (kind, *_freeze_each(fields(value), seen))
    if issubclass(kind, tuple) or kind is list or kind is deque:
        return _freeze_each
    if kind is dict or kind is OrderedDict:
        return _freeze_items
    if kind is set or kind is frozenset:
        return lambda value, seen: frozenset(value)
    attributes = _getter(_attributes(value))

    def freeze_once(value: Any, seen: dict[int, int]) -> Hashable:
        if (known := seen.get(id(value))) is not None:
            return ("ref", known)
        seen[id(value)] = len(seen)
        return _freeze_each(attributes(value), seen)

    return freeze_once


def _freeze_each(values: Iterable[Any], seen: dict[int, int]) -> tuple[Hashable, ...]:
    return tuple([one if type(one) in _ATOMS else freeze(one, seen) for one in values])


def _freeze_items(value: dict[Any, Any], seen: dict[int, int]) -> Hashable:
    items = list(value.items())
    # No step depends on the order of peers in a dict, but the path to a state changes it.
    if items and type(items[0][0]) is PeerKey:
        items.sort()
    elif items and type(items[0][0]) in (PrefillPeer, EarlierWriter):
        items.sort(key=_key_of)
    return tuple([(freeze(k, seen), freeze(v, seen)) for k, v in items])


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    # `attrgetter` returns no tuple for a single name.
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


def _key_of(item: tuple[PrefillPeer | EarlierWriter, Any]) -> tuple[bool, PeerKey]:
    """Return the sort key of a source of loans: peers first, then earlier writers."""
    source = item[0]
    if isinstance(source, EarlierWriter):
        return True, PeerKey(source.incarnation, source.control)
    return False, source.key


def _attributes(value: Any) -> tuple[str, ...]:
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    return tuple(sorted({*slots, *getattr(value, "__dict__", ())} - LEFT_OUT - {"__orig_class__"}))


# --- what is the same in every endpoint of one key


def tidy_decode(endpoint: DecodeEndpoint) -> None:
    """Reset the times, stories and causes of a decode, and drop empty entries of its ledger."""
    core = endpoint.core
    for peer in core.links.peers.values():
        peer.received_at_s = peer.sent_at_s = peer.tried_at_s = peer.used_at_s = 0.0
        peer.repeat_after_s = core.timing.repeat_after_s
    for record in core.rooms.values():
        record.opened_at_s = record.progress_at_s = 0.0
        record.resync_after_s = core.timing.repeat_after_s
        record.story = Story()
        if record.state.cause is not None:
            record.state = msgspec.structs.replace(record.state, cause=FIRST)
    for source in [source for source, loans in core.ledger._by_source.items() if not loans]:
        del core.ledger._by_source[source]
    _put_off(core.deadlines)


def tidy_prefill(endpoint: PrefillEndpoint) -> None:
    """Reset the times, stories and causes of a prefill, and number its rooms and writes anew."""
    core = endpoint.core
    for peer in core.peers.values():
        peer.received_at_s = 0.0
    for record in core.rooms.values():
        record.serial, record.opened_at_s, record.deadline_at_s = record.room, 0.0, FAR
        record.story, record.report = Story(), None
        for chunk in record.chunks:
            # The loop below numbers the chunks whose writes run.
            chunk.error, chunk.write = "", 0
        if record.state.cause is not None:
            record.state = msgspec.structs.replace(record.state, cause=FIRST)
    running = list(core.writes.values())
    core.writes.clear()
    for number, (record, chunk) in enumerate(running, 1):
        chunk.write = number
        core.writes[number] = (record, chunk)
    core._serial = core._write = 100
    outcomes = core.rendezvous._outcomes
    for room, outcome in outcomes.items():
        outcomes[room] = outcome._replace(forget_at_s=FAR)
    _put_off(core.deadlines)


def _put_off(deadlines: Deadlines[Any]) -> None:
    # Start with an empty object: the buckets of the old one still depend on the old times.
    timers = sorted(deadlines, key=repr)
    deadlines.__init__()  # type: ignore[misc]
    for timer in timers:
        deadlines.set(timer, FAR)
