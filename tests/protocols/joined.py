"""The machines joined without tables and bounds, one step at a time: for random walks over any number of ranks.

What each side does is `kvflow.testing.sim.explore_decode` and `explore_prefill`, the same as in the exhaustive walk.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from kvflow.protocols.machines.loan import LoanPhase
from kvflow.testing.sim import explore_decode, explore_prefill
from kvflow.testing.sim.explore_decode import Decode, LinkState
from kvflow.testing.sim.explore_prefill import Act, Prefill, Price, Word
from kvflow.testing.sim.explore_tables import neighbour, orphaned

CHUNKS = 3
NOTHING = Word("nothing")
Words = tuple[Word, ...]


class Lane(NamedTuple):
    """One prefill rank, and what is under way between it and decode, oldest first."""

    prefill: Prefill = Prefill()
    to_prefill: Words = ()
    to_decode: Words = ()


class World(NamedTuple):
    decode: Decode
    lanes: tuple[Lane, ...]

    def put(self, rank: int, lane: Lane) -> World:
        return self._replace(lanes=(*self.lanes[:rank], lane, *self.lanes[rank + 1 :]))

    @property
    def unsafe(self) -> bool:
        return self.decode.home and any(lane.prefill.writing for lane in self.lanes)

    @property
    def at_rest(self) -> bool:
        """As `Tables.at_rest`; pages that are not home wait for a rank that cannot know."""
        if not self.decode.over or any(lane.to_prefill or lane.to_decode for lane in self.lanes):
            return False
        loans = self.decode.loans or (LoanPhase.RETURNED,) * len(self.lanes)
        return all(
            lane.prefill.at_rest
            and (lane.prefill.tidy or not self.decode.settled)
            and (phase is LoanPhase.RETURNED or (phase is LoanPhase.DOUBTFUL and lane.prefill.unknowing))
            for lane, phase in zip(self.lanes, loans, strict=True)
        )


def start(ranks: int) -> World:
    return World(Decode(True, (LinkState.UP,) * ranks), (Lane(),) * ranks)


def steps(world: World, chunks: int = CHUNKS, in_flight: int = 99) -> list[tuple[Act[Any], World]]:
    """Everything that can happen, the link's own faults apart; what a full queue cannot take is lost."""
    found: list[tuple[Act[Any], World]] = []
    for rank, lane in enumerate(world.lanes):
        head = lane.to_prefill[0] if lane.to_prefill else NOTHING
        for act in explore_prefill.acts(lane.prefill, chunks, head, decode_over=world.decode.over):
            inbox = () if act.side.gone else lane.to_prefill[act.hears :]
            said = () if world.decode.deaf(rank) else (lane.to_decode + act.words[0])[:in_flight]
            found.append((act, world.put(rank, Lane(act.side, inbox, said))))
        head = lane.to_decode[0] if lane.to_decode else NOTHING
        for done in explore_decode.acts(world.decode, chunks, rank, neighbour(lane.prefill), head):
            if (after := _decode_did(world, rank, done, in_flight)) is not None:
                found.append((done, after))
    return found


def _decode_did(world: World, rank: int, act: Act[Decode], in_flight: int) -> World | None:
    lanes = list(world.lanes)
    lanes[rank] = lanes[rank]._replace(to_decode=lanes[rank].to_decode[act.hears :])
    for other, words in enumerate(act.words):
        prefill, to_prefill, to_decode = lanes[other]
        if act.timer and any(word in to_prefill for word in words):
            return None
        if not prefill.gone:
            to_prefill = (to_prefill + words)[:in_flight]
        if not act.side.alive:
            prefill, to_decode = orphaned(prefill), ()
        elif act.side.deaf(other):
            to_decode = ()
        lanes[other] = Lane(prefill, to_prefill, to_decode)
    return World(act.side, tuple(lanes))


def meddle(world: World, rng: random.Random) -> World:
    """The link loses a word, says it twice, or brings it first."""
    rank = rng.randrange(len(world.lanes))
    lane = world.lanes[rank]
    way = rng.choice(["to_prefill", "to_decode"])
    queue: Words = getattr(lane, way)
    if not queue:
        return world
    n = rng.randrange(len(queue))
    without, word = queue[:n] + queue[n + 1 :], queue[n]
    changed = rng.choice([without, (*queue, word), (word, *without)])
    return world.put(rank, lane._replace(**{way: changed}))


def is_fault(act: Act[Any]) -> bool:
    return act.price is not Price.NOTHING or not act.fair
