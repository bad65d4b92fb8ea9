"""The agreement of all ranks on how much of a prompt is cached: the amount at the rank that has the
least.

The caches of ranks may differ, because pools differ in size, copies fail, or a rank is restarted.
So the first rank asks the others before the first step of a request, and each rank locks the tokens
that it reports as cached.
"""

from __future__ import annotations

from typing import NamedTuple


class Agreed(NamedTuple):
    """The result of a question: every rank locked the first `tokens` tokens of request `ticket`."""

    ticket: int
    tokens: int


class _Question:
    __slots__ = ("missing", "ticket", "tokens")

    def __init__(self, ticket: int, tokens: int, missing: set[int]) -> None:
        self.ticket, self.tokens, self.missing = ticket, tokens, missing


class HitVotes:
    """Questions that some rank has not answered yet. Each answer takes constant time."""

    def __init__(self, world_size: int) -> None:
        self._others = range(1, world_size)
        self._questions: dict[int, _Question] = {}  # by number
        self._numbers: dict[int, int] = {}  # by ticket
        self._last = 0

    def __len__(self) -> int:
        return len(self._questions)

    def ask(self, ticket: int, tokens: int) -> int:
        """Ask about a prompt whose first `tokens` tokens the first rank has locked.

        Returns the question's number. An earlier question about the same ticket is dropped.
        """
        self.drop(ticket)
        self._last += 1
        self._questions[self._last] = _Question(ticket, tokens, set(self._others))
        self._numbers[ticket] = self._last
        return self._last

    def answer(self, rank: int, number: int, tokens: int) -> Agreed | None:
        """Record an answer. Returns the agreement if this was the last answer, else None."""
        question = self._questions.get(number)
        if question is None or rank not in question.missing:
            return None
        question.missing.discard(rank)
        question.tokens = min(question.tokens, tokens)
        if question.missing:
            return None
        self.drop(question.ticket)
        return Agreed(question.ticket, question.tokens)

    def drop(self, ticket: int) -> None:
        if (number := self._numbers.pop(ticket, None)) is not None:
            del self._questions[number]

    def clear(self) -> None:
        """Drop all questions, because the generation ended or the caches were flushed."""
        self._questions.clear()
        self._numbers.clear()
