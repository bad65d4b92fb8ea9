"""Work that a prefill puts off: tasks over many rooms, and the purposes of its deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from kvflow.protocols.errors import Cause
from kvflow.protocols.prefill.peers import DecodePeer


class Timer(msgspec.Struct, frozen=True, gc=False):
    """The purpose of a deadline.

    `key` is a room id for "room", an incarnation for "silence" and "goodbye", and 0 for "outcomes"
    and "announced".
    """

    kind: str
    key: int


class Task:
    """Work on many rooms, done one item at a time so that no tick takes long.

    `run` names the function for each item (see core.py), and `peer` is the decode they belong to.
    An item may change between the time it is queued and its turn.
    """

    __slots__ = ("cause", "items", "peer", "run")

    def __init__(
        self, run: str, items: Iterable[Any], cause: Cause, peer: DecodePeer | None = None
    ) -> None:
        self.run, self.cause, self.peer = run, cause, peer
        self.items: deque[Any] = deque(items)
