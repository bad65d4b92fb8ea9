"""The part of one machine that the acts of another depend on, and the first state of a world."""

from __future__ import annotations

from typing import NamedTuple

from kvflow.proof.walk.decode_side import Decode, DecodeSide
from kvflow.proof.walk.prefill_side import Prefill, PrefillSide
from kvflow.proof.walk.world import DECODE, World


class Neighbour(NamedTuple):
    """The part of a rank's state on which decode's acts depend."""

    life: int
    alive: bool
    answers: bool  # True if it answers heartbeats on a link to this life
    silent: bool  # True while it counts decode as silent
    oldest: int  # lowest grant that it remembers, or 0
    fenced: bool  # True if its first life is dead and no write of that life can still land


class Target(NamedTuple):
    """The part of decode's state on which a rank's acts depend."""

    over: bool  # True if no room is open and decode will open no more
    beats: tuple[bool, bool]  # for each life of the rank: True if decode still sends to it


def neighbour(prefill: Prefill) -> Neighbour:
    p = prefill
    answers, fenced = p.alive and p.knows, p.gone and not p.late
    return Neighbour(p.life, p.alive, answers, p.silent, p.oldest, fenced)


def target(decode: Decode, rank: int, rooms: int) -> Target:
    if not decode.alive:
        return Target(True, (False, False))
    return Target(decode.opened >= rooms and not decode.rooms, decode.ranks[rank].beats)


def orphaned(prefill: Prefill) -> Prefill:
    """Return `prefill` after decode's death. No late write can reach a dead decode's memory."""
    return prefill._replace(target_gone=True, late=0)


def start(world: World) -> tuple[Decode, Prefill]:
    """Return the first state of decode, and that of every prefill rank."""
    # Grant 1 is the earlier decode's, and a write into its pages may still land.
    late = world.reached(1, world.all_bits) if world.bounds.earlier else 0
    theirs = PrefillSide(Prefill(0, late=late), world, world.new_prefill(1)).run(_nothing)
    begin = DecodeSide.inherit if world.bounds.earlier else _nothing
    mine = DecodeSide(Decode(0), world, world.new_decode()).run(begin)
    if not world.bounds.registered:
        return mine, theirs
    # A registered world begins with its links up, so the walk spends no states on registration.
    decode = DecodeSide(mine, world)
    mine = decode.run(lambda side: _dial(side, world))
    theirs = PrefillSide(theirs, world).run(lambda side: side.hear(decode.words[0][0]))
    prefill = PrefillSide(theirs, world)
    theirs = prefill.run(lambda side: side.route(DECODE, opened=True))
    for rank in range(world.bounds.ranks):
        mine = DecodeSide(mine, world).run(
            lambda side, rank=rank: side.hear(rank, prefill.words[0])  # type: ignore[misc]
        )
    return mine, theirs


def _nothing(side: object) -> None:
    return None


def _dial(side: DecodeSide, world: World) -> None:
    side.endpoint._peers([world.info(rank, 1) for rank in range(world.bounds.ranks)], 0.0)
