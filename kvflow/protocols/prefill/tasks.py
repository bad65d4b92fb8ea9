"""What a prefill has put off: work on many rooms, cut up, and what its deadlines are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.prefill.peers import DecodePeer


class Timer(msgspec.Struct, frozen=True, gc=False):
    """What a deadline is for.

    `key`: a room id for "room", an incarnation for "silence" and "goodbye", 0 for "outcomes" and
    "announced"."""

    kind: str
    key: int


class Task:
    """Work on many rooms at once is cut up, so that no tick takes long: one of `items` at a time,
    which may have changed since it was queued. `run` names what is done to each (see
    `prefill_core`); `peer` is whose they are."""

    __slots__ = ("cause", "items", "peer", "run")

    def __init__(
        self, run: str, items: Iterable[Any], cause: Cause, peer: DecodePeer | None = None
    ) -> None:
        self.run, self.cause, self.peer = run, cause, peer
        self.items: deque[Any] = deque(items)
