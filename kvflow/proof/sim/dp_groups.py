"""Checks that messages about a room reach only the data-parallel group that serves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode
from kvflow.proof.rules.judge import Side
from kvflow.proof.sim.loop import VirtualLoop
from kvflow.proof.sim.swap import swaps
from kvflow.proof.sim.times import DELAY_S, HEAR_S
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.errors import KvflowError
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.wire.messages import Abort, Announce, Bootstrap, Message
from kvflow.protocols.wire.ranks import RankInfo

Prefill = str | Sequence[RankInfo]


class DpGroup(NamedTuple):
    dp_rank: int = 0
    dp_size: int = 1


def dp_groups_of(groups: Sequence[int]) -> dict[int, DpGroup]:
    return {group: DpGroup(dp_rank, len(groups)) for dp_rank, group in enumerate(groups)}


class DpGroups:
    """Check that decodes send messages about a room only to the group that serves it (I4).

    The rule that assigns a room to a group is repeated here, so that the check does not rely on the
    code under test.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        by_incarnation: Mapping[int, Side],
        broken: Callable[[str, str], None],
    ) -> None:
        self.groups: Mapping[int, DpGroup] = {}
        """Groups of the data-parallel prefill, by number."""
        self.told_to_every_group = 0  # number of refused rooms that named a missing group
        self._loop, self._by_incarnation, self._broken = loop, by_incarnation, broken
        self._group_of: dict[int, int] = {}  # group of each prefill, by incarnation
        # Groups that may receive messages about a room, by (decode, room).
        self._homes: dict[tuple[int, int], set[int]] = {}
        # Time of the last Abort for a room, by (prefill, decode, room).
        self._refused_at_s: dict[tuple[int, int, int], float] = {}
        # Rooms that wait for a registry, with their node, groups and deadline.
        self._asking: dict[DecodeRoom, tuple[DecodeNode, set[int], float]] = {}

    def joined(self, incarnation: int, group: int) -> None:
        self._group_of[incarnation] = group

    def asked(self, node: DecodeNode, room: int, prefill: Prefill, dp_rank: int | None) -> None:
        self._may_hear(node, room, self._chosen(prefill, room, dp_rank))

    def opened(
        self,
        node: DecodeNode,
        room: DecodeRoom,
        prefill: Prefill,
        dp_rank: int | None,
        deadline_s: float | None,
    ) -> None:
        if room in node.shell.opening:
            until_s = float("inf") if deadline_s is None else self._loop.time() + deadline_s
            self._asking[room] = node, self._chosen(prefill, room.room, dp_rank), until_s

    def ended_unopened(self, room: DecodeRoom) -> None:
        """Record a room that ends before any rank knows of it.

        Decode notifies the room's group once the registry answers, unless the deadline passes
        first.
        """
        asking = self._asking.pop(room, None)
        if asking is None:
            return
        node, groups, until_s = asking
        if room in node.shell.opening and until_s > self._loop.time() + DELAY_S[1]:
            self._expect_told(node, room.room, groups)

    def refused(self, node: DecodeNode, room: int, prefill: Prefill, dp_rank: int | None) -> None:
        """Record that decode must notify prefill that a room will not come. Decode must notify all
        groups if the room names a group that prefill lacks.
        """
        groups = self._chosen(prefill, room, dp_rank)
        if not groups:
            groups = self._given(prefill)
            self.told_to_every_group += 1
        self._may_hear(node, room, groups)
        self._expect_told(node, room, groups)

    def said(self, message: Message) -> None:
        if not isinstance(message, Announce | Bootstrap | Abort):
            return
        if isinstance(message, Abort):
            self._refused_at_s[message.source, message.target, message.room] = self._loop.time()
        homes = self._homes.get((message.target, message.room))
        group = self._group_of.get(message.source)
        if homes is not None and group not in homes:
            text = f"room {message.room} is of group {sorted(homes)}"
            self._broken("I4", f"{text}, and group {group} hears {type(message).__name__}")

    # --- the rule

    def _given(self, prefill: Prefill) -> set[int]:
        if isinstance(prefill, str):
            return set(self.groups)
        return {self._group_of[info.incarnation] for info in prefill}

    def _chosen(self, prefill: Prefill, room: int, dp_rank: int | None) -> set[int]:
        """Return a set with the group that serves a room. It is empty if the room names a missing
        group.

        If the prefill is not the data-parallel one, the set has all groups of the prefill.
        """
        given = self._given(prefill)
        if not given <= self.groups.keys() or (len(given) == 1 and dp_rank is None):
            return given
        served = {group: self.groups[group] for group in given}
        return {
            group
            for group, own in served.items()
            if own.dp_rank == (room % own.dp_size if dp_rank is None else dp_rank)
        }

    # --- refusals

    def _may_hear(self, node: DecodeNode, room: int, groups: set[int]) -> None:
        self._homes.setdefault((node.incarnation, room), set()).update(groups)

    def _expect_told(self, node: DecodeNode, room: int, groups: set[int]) -> None:
        """Schedule a check that decode notifies the groups to which it is linked.

        A group is skipped if decode also considers an earlier incarnation of one of its ranks
        usable, because decode may notify that one instead.
        """
        usable = Counter(peer.key.control for peer in node.shell.endpoint.peers if peer.usable)
        for group in groups:
            linked = [peer for peer in node.shell.endpoint.peers if self._is_current(peer, group)]
            up = (peer.phase is LinkPhase.UP and usable[peer.key.control] == 1 for peer in linked)
            if linked and all(up):
                told = node, room, group, linked, self._loop.time()
                self._loop.later(DELAY_S[1] + HEAR_S, self._check_told, *told)

    def _is_current(self, peer: PrefillPeer, group: int) -> bool:
        incarnation = peer.key.incarnation
        if self._group_of.get(incarnation) != group:
            return False
        seen = self._by_incarnation[incarnation]
        return seen.alive and not seen.displaced

    def _check_told(
        self, node: DecodeNode, room: int, group: int, peers: Sequence[PrefillPeer], since_s: float
    ) -> None:
        """Verify that a group learned of the end of a room, unless a link was in trouble."""
        seen = self._by_incarnation[node.incarnation]
        if not seen.up or seen.troubled_at_s >= since_s or node.shell.leaving:
            return
        if any(
            peer.phase is not LinkPhase.UP or not self._is_current(peer, group) for peer in peers
        ):
            return
        for peer in peers:
            told_at_s = self._refused_at_s.get((peer.key.incarnation, node.incarnation, room), -1.0)
            if told_at_s < since_s:
                text = f"room {room} is refused at decode {node.incarnation:x}"
                who = f"rank {peer.info.rank} of group {group}"
                self._broken("I4", f"{text}, and {who} is not told")


def asked_observed(groups: DpGroups) -> AbstractContextManager[None]:
    """Make every decode in this process report to `groups` the rooms that it opens or refuses."""
    refuse, end_unopened = DecodeNode.refuse, DecodeShell._refused

    def observed(open_room: Callable[..., DecodeRoom]) -> Callable[..., DecodeRoom]:
        def opened(
            self: DecodeNode, room: int, prefill: Prefill, *arguments: Any, **named: Any
        ) -> DecodeRoom:
            groups.asked(self, room, prefill, named.get("dp_rank"))
            found = open_room(self, room, prefill, *arguments, **named)
            groups.opened(self, found, prefill, named.get("dp_rank"), named.get("deadline_s"))
            return found

        return opened

    def refused(
        self: DecodeNode, room: int, prefill: Prefill, *arguments: Any, **named: Any
    ) -> None:
        groups.refused(self, room, prefill, named.get("dp_rank"))
        refuse(self, room, prefill, *arguments, **named)

    def ended(self: DecodeShell, room: DecodeRoom, error: KvflowError) -> None:
        end_unopened(self, room, error)
        groups.ended_unopened(room)

    return swaps(
        (
            (DecodeNode, "room", observed(DecodeNode.room)),
            (DecodeNode, "announce", observed(DecodeNode.announce)),
            (DecodeNode, "refuse", refused),
            (DecodeShell, "_refused", ended),
        )
    )
