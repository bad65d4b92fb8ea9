"""Copies that take virtual time: two halves with a delay before each, and faults in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvflow.aio import Job
from kvflow.proof.sim.loop import VirtualLoop
from kvflow.proof.sim.pages import Books
from kvflow.proof.sim.times import COPY_S, HUNG_COPY_S, SLOW_COPY_S
from kvflow.protocols.pages.layout import Places

FAILED = "a copy fails half-way (on purpose)"
_SPANS = {"slow copy": SLOW_COPY_S, "hung copy": HUNG_COPY_S}


def after_half_a_copy(
    loop: VirtualLoop, fault: str, do: Callable[..., object], *arguments: object
) -> None:
    loop.call_later(loop.rng.uniform(*_SPANS.get(fault, COPY_S)), do, *arguments)


class Copy:
    """Copy between two pools. The places that it uses count as read until it ends."""

    def __init__(
        self,
        job: Job[Any],
        source: Books,
        target: Books,
        fault: str,
        ended: Callable[[bool | None], None],
    ) -> None:
        """Prepare a copy. `job` copies one half per call, and returns False if it was cancelled.
        `ended` receives the result of the last call, or None if the copy failed.
        """
        _, sources, targets, *_ = job.arguments
        self.job, self.fault, self._ended = job, fault, ended
        self.used = [*_used(source, sources), *_used(target, targets)]
        self._halves = _halves(sources, targets)

    def begin(self, loop: VirtualLoop) -> None:
        for books, place in self.used:
            books.readers[place] += 1
        after_half_a_copy(loop, self.fault, self._half, loop)

    def _half(self, loop: VirtualLoop) -> None:
        pairing, _, _, *rest = self.job.arguments
        whole = self.job.work(pairing, *self._halves.pop(0), *rest, self.job.is_cancelled)
        if not whole or not self._halves:
            self._end(whole)
        elif self.fault == "failed copy":
            self._end(None)
        else:
            after_half_a_copy(loop, self.fault, self._half, loop)

    def _end(self, answer: bool | None) -> None:
        for books, place in self.used:
            books.readers[place] -= 1
        self._ended(answer)


def _halves(source: Places, target: Places) -> list[tuple[Places, Places]]:
    """Return the halves of a copy, with half of the places of each space. A single row is in the
    second half.
    """
    return [
        (
            tuple(own[: len(own) // 2] for own in source),
            tuple(own[: len(own) // 2] for own in target),
        ),
        (
            tuple(own[len(own) // 2 :] for own in source),
            tuple(own[len(own) // 2 :] for own in target),
        ),
    ]


def _used(books: Books, places: Places) -> list[tuple[Books, int]]:
    return [(books, place) for place in books.layout.numbered(places).tolist()]
