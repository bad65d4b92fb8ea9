"""Planted bugs at decode: messages about rooms reach the wrong data-parallel group, or none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.node import DecodeNode
from kvflow.node import decode as node
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.errors import room_error
from kvflow.protocols.wire.ranks import RankInfo, group_for, groups_to_tell

PLANTS: list[Plant] = []
bug = planting(PLANTS, "no endpoint knows of groups")


@bug("end told by another rule", nodes=(12, "I4"))
def told_by_another_rule() -> Installed:
    """The group of a room is what it names when it is opened, and what its number says when it
    is refused.
    """

    def told(ranks: Sequence[RankInfo], room: int, dp_rank: int | None) -> list[Sequence[RankInfo]]:
        # Call the original as well, because it may raise.
        groups_to_tell(ranks, room, dp_rank)
        return [group_for(ranks, room)]

    return swapped(node, "groups_to_tell", told)


@bug("only the first group told", nodes=(12, "I4"))
def only_the_first_group_told() -> Installed:
    """A refusal that names no group of its prefill is told to the first one."""

    def told(ranks: Sequence[RankInfo], room: int, dp_rank: int | None) -> list[Sequence[RankInfo]]:
        return groups_to_tell(ranks, room, dp_rank)[:1]

    return swapped(node, "groups_to_tell", told)


@bug("linked groups mixed up", nodes=(12, "I4"))
def linked_groups_mixed_up() -> Installed:
    """Once a prefill is linked, the number of a room decides, whatever group it names."""
    original = DecodeNode._known

    def known(
        self: DecodeNode, prefill: str, room: int, dp_rank: int | None
    ) -> Sequence[RankInfo] | None:
        return original(self, prefill, room, None)

    return swapped(DecodeNode, "_known", known)


@bug("closed while its group is asked for", nodes=(170, "I4"))
def closed_while_asked_not_told() -> Installed:
    """A room that is closed before the registry has answered is told to no prefill."""
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
