"""One request of a group, as a rank that follows the first one knows it."""

from __future__ import annotations

from typing import Protocol

from kvflow.protocols.cache.hashes import Namespace
from kvflow.serve.engine.model.sequence import Prompt
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest
from kvflow.serve.engine.scheduler.rooms import PrefillRoomPort


class FollowedRoom(PrefillRoomPort, Protocol):
    """`prefix_tokens` is known once it is matched."""

    @property
    def prefix_tokens(self) -> int: ...

    @property
    def ended(self) -> bool: ...


class Followed:
    """One request of the group at this rank.

    `request` while it has places, from the first step that names it, or a cached prefix, before
    that."""

    __slots__ = ("kept", "namespace", "params", "prompt", "request", "room", "started")

    def __init__(
        self, room: FollowedRoom, prompt: Prompt, params: SamplingParams, namespace: Namespace
    ) -> None:
        self.room, self.prompt, self.params, self.namespace = room, prompt, params, namespace
        self.started = self.kept = False
        self.request: PrefillRequest | None = None

    @property
    def may_send(self) -> bool:
        """Started here, so that the group takes notice of what has landed, and at the first rank,
        which could have taken its places before."""
        return self.started and self.kept and not self.room.ended
