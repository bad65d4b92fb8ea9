"""The shipped endpoints joined for random walks over several ranks; see `kvflow.proof.walk`."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from kvflow.proof.walk.acts import Acts
from kvflow.proof.walk.decode_side import Decode
from kvflow.proof.walk.neighbours import neighbour, orphaned, start, target
from kvflow.proof.walk.prefill_side import Prefill
from kvflow.proof.walk.tables import deaf
from kvflow.proof.walk.world import Act, Bounds, Price, ViolationError, Words, World, described


class Lane(NamedTuple):
    """One prefill rank, and what is under way between it and decode, oldest first."""

    prefill: Prefill
    to_prefill: Words = ()
    to_decode: Words = ()

    def under_way(self, way: str, words: Words) -> Lane:
        """Return the lane with other words on its way `to_prefill` or `to_decode`."""
        if way == "to_prefill":
            return self._replace(to_prefill=words)
        return self._replace(to_decode=words)


class State(NamedTuple):
    decode: Decode
    lanes: tuple[Lane, ...]

    def put(self, rank: int, lane: Lane) -> State:
        return self._replace(lanes=(*self.lanes[:rank], lane, *self.lanes[rank + 1 :]))


class Joined:
    """Decode and its prefill ranks, within `bounds`; faults of the link are the caller's."""

    def __init__(self, bounds: Bounds, acts: type[Acts] = Acts) -> None:
        self.bounds, self.world = bounds, World(bounds)
        self.acts = acts(self.world)
        decode, prefill = start(self.world)
        self.start = State(decode, (Lane(prefill),) * bounds.ranks)

    def steps(self, state: State) -> list[tuple[Act[Any], State]]:
        """Everything but faults of the link. What a full queue cannot take is lost."""
        found: list[tuple[Act[Any], State]] = []
        rooms = len(self.bounds.rooms)
        crashed = not state.decode.alive or any(lane.prefill.gone for lane in state.lanes)
        for rank, lane in enumerate(state.lanes):
            seen = target(state.decode, rank, rooms)
            theirs = self.acts.of_prefill(lane.prefill, seen)
            if lane.to_prefill and lane.prefill.alive:
                theirs = [*theirs, self.acts.prefill_hears(lane.prefill, lane.to_prefill[0])]
            for act in theirs:
                inbox = () if act.price is Price.CRASH else lane.to_prefill[act.hears :]
                said = () if deaf(state.decode, rank, rooms) else lane.to_decode + act.words[0]
                found.append(
                    (act, state.put(rank, Lane(act.side, inbox, self._fit(state, rank, said, 2))))
                )
            mine = self.acts.of_decode(state.decode, rank, neighbour(lane.prefill))
            if lane.to_decode and state.decode.alive:
                mine = [*mine, self.acts.decode_hears(state.decode, rank, lane.to_decode[0])]
            for done in mine:
                if (after := self._decode_did(state, rank, done)) is not None:
                    found.append((done, after))
        return [(act, after) for act, after in found if not (crashed and act.price is Price.CRASH)]

    def _fit(self, state: State, rank: int, queue: Words, part: int) -> Words:
        others = sum(len(lane[part]) for other, lane in enumerate(state.lanes) if other != rank)
        return queue[: self.bounds.in_flight - others]

    def _decode_did(self, state: State, rank: int, act: Act[Decode]) -> State | None:
        after = state._replace(decode=act.side)
        lane = state.lanes[rank]
        after = after.put(rank, lane._replace(to_decode=lane.to_decode[act.hears :]))
        for other, words in enumerate(act.words):
            prefill, to_prefill, to_decode = after.lanes[other]
            if act.timer and any(word in to_prefill for word in words):
                return None
            if prefill.alive:
                to_prefill = self._fit(after, other, to_prefill + words, 1)
            if not act.side.alive:
                prefill, to_decode = orphaned(prefill), ()
            elif deaf(act.side, other, len(self.bounds.rooms)):
                to_decode = ()
            after = after.put(other, Lane(prefill, to_prefill, to_decode))
        return after

    def check(self, act: Act[Any], after: State) -> None:
        """Raises: ViolationError."""
        if act.broken:
            raise ViolationError(act.broken)
        if self.unsafe(after):
            raise ViolationError(f"I2: {after}")
        whole = (1 << self.bounds.chunks) - 1
        if act.succeeded and any(
            lane.prefill.landed[act.succeeded] != whole for lane in after.lanes
        ):
            raise ViolationError("I8: success without all pages of all ranks")

    @staticmethod
    def unsafe(state: State) -> bool:
        """I2: pages are free or their user's, and somebody may write into them."""
        home = sum(1 << n for n, g in enumerate(state.decode.grants, 1) if g.home)
        return any(
            home & lane.prefill.writing and (rank, 1) not in state.decode.declared
            for rank, lane in enumerate(state.lanes)
        )

    def at_rest(self, state: State) -> bool:
        """As `Tables.at_rest`; pages that are not home wait for a rank that cannot know."""
        decode, rooms = state.decode, len(self.bounds.rooms)
        if not target(decode, 0, rooms).over or decode.busy:
            return False
        for rank, (prefill, to_prefill, to_decode) in enumerate(state.lanes):
            if to_prefill or to_decode or (not prefill.alive and prefill.late):
                return False
            waits = (
                prefill.writes
                or prefill.outcomes
                or prefill.asked < rooms
                or (prefill.target_gone and prefill.watched)
            )
            if prefill.alive and (not prefill.idle or waits):
                return False
            if not decode.alive:
                continue
            mine = decode.ranks[rank]
            if (mine.owes == 2 or (mine.owes == 1 and not prefill.doubts)) and not decode.closed:
                return False
            if prefill.oldest and prefill.oldest < mine.settled:
                return False
        return True

    def follow(self, path: list[str]) -> State:
        """The state that these events lead to, in words as `kvflow sim --exhaust` prints them."""
        state = self.start
        for text in path:
            if text.startswith("the link loses"):
                state = self.lose(state, text)
                continue
            found = [(act, after) for act, after in self.steps(state) if act.text == text]
            assert found, (
                f"{text!r} cannot happen; what can: {[act.text for act, _ in self.steps(state)]}"
            )
            self.check(*found[0])
            state = found[0][1]
        return state

    @staticmethod
    def lose(state: State, text: str) -> State:
        part = "to_prefill" if text.endswith("to prefill") else "to_decode"
        for rank, lane in enumerate(state.lanes):
            queue: Words = getattr(lane, part)
            for n, word in enumerate(queue):
                if described(word) in text:
                    return state.put(rank, lane.under_way(part, queue[:n] + queue[n + 1 :]))
        raise AssertionError(f"nothing to lose: {text}")

    def settle(self, state: State, rng: random.Random, most: int = 3_000) -> State:
        """A fair run without further faults. Raises: AssertionError when it finds no rest."""
        for _ in range(most):
            if self.at_rest(state):
                return state
            fair = [(act, after) for act, after in self.steps(state) if not is_fault(act)]
            assert fair, f"no rest: {state}"
            act, state = rng.choices(fair, [0.3 if act.timer else 1.0 for act, _ in fair])[0]
            self.check(act, state)
        raise AssertionError(f"no rest: {state}")


def meddle(state: State, rng: random.Random) -> State:
    """The link loses a word, brings it twice, or brings it first."""
    rank = rng.randrange(len(state.lanes))
    lane = state.lanes[rank]
    way = rng.choice(["to_prefill", "to_decode"])
    queue: Words = getattr(lane, way)
    if not queue:
        return state
    n = rng.randrange(len(queue))
    without, word = queue[:n] + queue[n + 1 :], queue[n]
    changed = rng.choice([without, (*queue, word), (word, *without)])
    return state.put(rank, lane.under_way(way, changed))


def is_fault(act: Act[Any]) -> bool:
    return act.price is not Price.NOTHING or not act.fair
