"""One request of a group, at a rank that follows the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvflow.protocols.cache.hashes import Namespace
from kvflow.serve.engine.model.sequence import Prompt
from kvflow.serve.engine.scheduler.adjustments import Adjustments
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest
from kvflow.serve.engine.scheduler.rooms import PrefillRoomPort


class FollowedRoom(PrefillRoomPort, Protocol):
    """A request's room at a following rank. `prefix_tokens` is known once the halves have met."""

    @property
    def prefix_tokens(self) -> int: ...

    @property
    def ended(self) -> bool: ...


@dataclass(slots=True, eq=False, repr=False)
class Followed:
    """One request of the group at this rank.

    A rank that chooses first tokens is `compiling` until it has the request's grammar, which the
    `adjustments` then contain. No step names the request before that.

    `request` is set while the request has places, from the first step that names it. Before that,
    it is set while the request holds a cached prefix.
    """

    room: FollowedRoom
    prompt: Prompt
    params: SamplingParams
    namespace: Namespace
    started: bool = False
    kept: bool = False
    compiling: bool = False
    adjustments: Adjustments | None = None
    request: PrefillRequest | None = None

    @property
    def may_send(self) -> bool:
        """True if the request is started at this rank and kept at the first rank, and its room has
        not ended.

        Before this rank starts it, the group ignores pages that land. Before the first rank keeps
        it, that rank may still take its places away.
        """
        return self.started and self.kept and not self.room.ended
