"""Incremental detokenization that handles split characters and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.scheduler.stops import StopStrings


class TextStream:
    """Turns one request's tokens into text.

    `stopped` is the stop string that ended the text, or None. Tokens fed after it add no text.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """`tokenizer` is a tokenizers.Tokenizer, or a fast transformers tokenizer around one.

        The text of the first `min_tokens` tokens is not searched for stop strings. The text ends
        before the stop string, or after it with `include_stop`.

        Raises: MisuseError if the tokenizer is not a fast one, or if `stop` exceeds its limits.
        """
        backend = (
            tokenizer
            if isinstance(tokenizer, Tokenizer)
            else getattr(tokenizer, "backend_tokenizer", None)
        )
        if not isinstance(backend, Tokenizer):
            text = f"{type(tokenizer).__name__} is not a fast tokenizer, which streaming needs"
            raise MisuseError(text)
        self._tokenizer = backend
        self._special = skip_special_tokens
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = StopStrings(stop)
        self._state = 0  # state of the automaton after the searched text
        self._unsearched = min_tokens
        self.include_stop = include_stop
        self._pending = ""  # decoded text that is held back
        self._since: list[int] = []  # tokens since the decoder last returned text
        self.stopped: str | None = None

    def feed(self, token_id: int) -> str:
        """Return the text that becomes certain with this token. It is often empty."""
        if self.stopped is not None:
            return ""
        unsearched, self._unsearched = self._unsearched > 0, self._unsearched - 1
        piece = self._decoder.step(self._tokenizer, token_id)
        if piece is None:
            self._since.append(token_id)
            return ""
        self._since.clear()
        return piece if unsearched else self._release(piece)

    def finish(self) -> str:
        """Return the text that was held back, with incomplete characters as U+FFFD."""
        text = ""
        if self._since:
            text = self._tokenizer.decode(self._since, skip_special_tokens=self._special)
            self._since.clear()
        text = self._release(text)
        rest, self._pending = self._pending, ""
        return text + rest

    def _release(self, piece: str) -> str:
        self._pending += piece
        state = self._state
        for character in piece:
            state = self._stop.after(state, character)
            if self._stop.complete(state):
                return self._end()
        self._state = state
        cut = len(self._pending) - self._stop.held(state)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def _end(self) -> str:
        """End the text at the stop string that begins first, and return the last piece of text.

        If several begin at the same character, the first of them in `stop` counts.
        """
        hits = [(at, s) for s in self._stop if (at := self._pending.find(s)) >= 0]
        at, self.stopped = min(hits, key=lambda hit: hit[0])
        end = at + len(self.stopped) if self.include_stop else at
        text, self._pending = self._pending[:end], ""
        return text
