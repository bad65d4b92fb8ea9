"""Stop strings, and an automaton that finds them in streamed text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from kvflow.protocols.errors import MisuseError

MAX_STOPS = 64
# The automaton has a state per character. 2,048 states take 0.5 ms to build and 0.5 MB of memory.
MAX_STOP_CHARACTERS = 2048


class StopStrings(tuple[str, ...]):
    """Stop strings, checked, with an Aho-Corasick automaton that finds them.

    The states of the automaton are the prefixes of the stop strings. After any text, it is in the
    state for the longest prefix with which the text ends. So one look-up per character finds every
    stop string and the text to hold back, however many strings there are and however long they are.
    The automaton never changes, and all completions of a body share it.
    """

    _next: list[dict[str, int]]
    _shorter: list[int]  # by state: the longest shorter state that is its suffix
    _length: list[int]
    _complete: list[bool]  # by state: True if it ends with a stop string

    def __new__(cls, strings: Iterable[str] = ()) -> Self:
        """Check the strings, and build the automaton. Raises: MisuseError."""
        if isinstance(strings, cls):
            return strings
        made = super().__new__(cls, strings)
        if len(made) > MAX_STOPS:
            raise MisuseError(f"stop: {len(made)} strings, limit {MAX_STOPS}")
        if "" in made:
            raise MisuseError("stop: an empty string ends every completion at once; leave it out")
        if (characters := sum(map(len, made))) > MAX_STOP_CHARACTERS:
            raise MisuseError(
                f"stop: {characters} characters in all strings, limit {MAX_STOP_CHARACTERS}"
            )
        made._build()
        return made

    def _build(self) -> None:
        self._next, self._length, self._complete = [{}], [0], [False]
        for string in self:
            state = 0
            for character in string:
                state = self._next[state].get(character) or self._new_state(state, character)
            self._complete[state] = True
        self._shorter = [0] * len(self._next)
        states = [0]
        # Visit states in order of length, because shorter ones determine the links of longer ones.
        for state in states:
            for character, longer in self._next[state].items():
                if state:
                    self._shorter[longer] = shorter = self.after(self._shorter[state], character)
                    self._complete[longer] |= self._complete[shorter]
                states.append(longer)

    def _new_state(self, state: int, character: str) -> int:
        made = self._next[state][character] = len(self._next)
        self._next.append({})
        self._length.append(self._length[state] + 1)
        self._complete.append(False)
        return made

    def after(self, state: int, character: str) -> int:
        """Return the state after one more character of a text; the state of an empty text is 0."""
        while character not in self._next[state]:
            if not state:
                return 0
            state = self._shorter[state]
        return self._next[state][character]

    def complete(self, state: int) -> bool:
        return self._complete[state]

    def held(self, state: int) -> int:
        """Return how many characters at the end of the text may be the start of a stop string."""
        return self._length[state]
