"""An incremental scanner of JSON, which finds where a value ends and copies its text."""

from __future__ import annotations

_SPACE = frozenset(" \t\r\n")
_OPENING, _CLOSING = frozenset("[{"), frozenset("]}")
# Outside strings these characters are in no JSON text, and tags of model families begin with them.
_FOREIGN = frozenset("<")


class JsonValue:
    """One JSON value, read character by character. Its text is not checked any further.

    `done` is True once the value is complete. The end of a number or a word is the first character
    after it, which `take` does not take.
    """

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._begun = False

    def take(self, character: str) -> bool:
        """Return True if the value goes on with `character`."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self.done = not self._in_string and not self._depth
            return True
        if character in _FOREIGN:
            self.done = True
            return False
        if self._begun and not self._depth and (character in _SPACE or character in ",]}"):
            self.done = True
            return False
        self._begun = True
        if character == '"':
            self._in_string = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            self.done = self._depth <= 0
        return True
