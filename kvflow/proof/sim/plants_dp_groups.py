"""Planted bugs of data-parallel prefills: rooms of the wrong group, ends reported to it, or to some
groups only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode
from kvflow.node import decode as node
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.errors import room_error
from kvflow.protocols.wire.ranks import RankInfo, group_for, groups_to_tell

Installed = AbstractContextManager[object]


def told_by_another_rule() -> Installed:
    def told(ranks: Sequence[RankInfo], room: int, dp_rank: int | None) -> list[Sequence[RankInfo]]:
        # Call the original as well, because it may raise.
        groups_to_tell(ranks, room, dp_rank)
        return [group_for(ranks, room)]

    return swapped(node, "groups_to_tell", told)


def only_the_first_group_told() -> Installed:
    def told(ranks: Sequence[RankInfo], room: int, dp_rank: int | None) -> list[Sequence[RankInfo]]:
        return groups_to_tell(ranks, room, dp_rank)[:1]

    return swapped(node, "groups_to_tell", told)


def linked_groups_mixed_up() -> Installed:
    original = DecodeNode._known

    def known(
        self: DecodeNode, prefill: str, room: int, dp_rank: int | None
    ) -> Sequence[RankInfo] | None:
        return original(self, prefill, room, None)

    return swapped(DecodeNode, "_known", known)


def closed_while_asked_not_told() -> Installed:
    original = DecodeShell._resolve_and_open

    async def resolve_and_open(
        self: DecodeShell,
        room: DecodeRoom,
        resolve: Callable[[], Awaitable[Sequence[RankInfo]]],
        *rest: Any,
    ) -> None:
        async def asked() -> Sequence[RankInfo]:
            ranks = await resolve()
            if room.refused is not None:
                raise room_error(room.refused)
            return ranks

        await original(self, room, asked, *rest)

    return swapped(DecodeShell, "_resolve_and_open", resolve_and_open)


PLANTS = (
    (
        "end told by another rule",
        (
            "the group of a room is what it names when it is opened, and what its number says when "
            "it is refused"
        ),
        told_by_another_rule,
        "I4",
    ),
    (
        "only the first group told",
        "a refusal that names no group of its prefill is told to the first one",
        only_the_first_group_told,
        "I4",
    ),
    (
        "linked groups mixed up",
        "once a prefill is linked, the number of a room decides, whatever group it names",
        linked_groups_mixed_up,
        "I4",
    ),
    (
        "closed while its group is asked for",
        "a room that is closed before the registry has answered is told to no prefill",
        closed_while_asked_not_told,
        "I4",
    ),
)
