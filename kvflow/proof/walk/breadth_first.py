"""A breadth-first walk through a small world, and a check that every state can come to rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from time import monotonic
from typing import Any, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class World(Protocol[S]):
    """A world to walk through. States with the same future compare equal."""

    def start(self) -> S: ...

    def acts(self, state: S) -> Iterator[tuple[str, bool, Callable[[], S]]]:
        """Yield (text, fair, step) for each act. `step` returns the state after the act.

        A fair act happens sooner or later, without a new fault.
        """

    def rests(self, state: S) -> bool:
        """Return True if no work is under way in `state`."""


def walk(world: World[S], say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Visit every state, and check that each can come to rest by fair acts alone.

    If a rule is broken, the report names it as `broken`, with the acts that lead to it as `path`.
    """
    began = monotonic()
    start = world.start()
    number = {start: 0}
    # The first step into each state. The walk is breadth-first, so these steps form shortest paths.
    came: list[tuple[int, str]] = [(0, "")]
    fair: list[tuple[int, int]] = []
    waiting = deque([start])
    steps = 0
    report: dict[str, Any] = {"violations": 0}
    while waiting:
        state = waiting.popleft()
        source = number[state]
        for text, fairly, step in world.acts(state):
            steps += 1
            try:
                after = step()
            except AssertionError as error:
                path = [*_path(came, source), text]
                report |= {"violations": 1, "broken": f"{error}", "path": path}
                say("\n".join([report["broken"], *report["path"]]))
                return report | _counted(len(number), steps, began)
            if after not in number:
                number[after] = len(number)
                came.append((source, text))
                waiting.append(after)
                if len(number) % 20_000 == 0:
                    say(f"{len(number):,} states, {steps:,} transitions")
            if fairly:
                fair.append((source, number[after]))
    can = {n for state, n in number.items() if world.rests(state)}
    report["rest_states"] = len(can)
    # Follow fair acts backwards from the states of rest. A state that is not reached cannot come
    # to rest.
    into: dict[int, list[int]] = {}
    for source, target in fair:
        into.setdefault(target, []).append(source)
    reached = list(can)
    while reached:
        for source in into.get(reached.pop(), ()):
            if source not in can:
                can.add(source)
                reached.append(source)
    if len(can) < len(number):
        stuck = min(set(range(len(number))) - can)
        text = f"rest: {len(number) - len(can)} states can never come to rest"
        report |= {"violations": 1, "broken": text, "path": _path(came, stuck)}
    return report | _counted(len(number), steps, began)


def _counted(states: int, steps: int, began: float) -> dict[str, Any]:
    return {"states": states, "transitions": steps, "seconds": round(monotonic() - began, 1)}


def _path(came: list[tuple[int, str]], number: int) -> list[str]:
    texts: list[str] = []
    while number:
        number, text = came[number]
        texts.append(text)
    return texts[::-1]
