"""Log-probabilities of a prompt's tokens, packed for the handoff, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES

# The remaining bytes are for the other fields of the handoff.
MAX_BYTES = MAX_HANDOFF_BYTES - (1 << 16)
_FLOATS, _IDS = np.dtype("<f4"), np.dtype("<i4")


class ScoredToken(NamedTuple):
    """One token of a prompt with its log-probabilities.

    `logprob` is None for the first requested token, as in SGLang's responses.
    """

    token_id: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]]
    asked_logprobs: list[tuple[int, float]]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the prompt tokens after position `start`, each given all tokens before
    it.

    `logprobs` is float32 [tokens]. `top_ids`, int32 [tokens, top], are the most likely tokens at
    each position, the most likely one first, and `top_logprobs`, float32 [tokens, top], are their
    log-probabilities. `asked`, float32 [tokens, ids], are the log-probabilities of the ids that the
    request names.
    """

    start: int
    logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    asked: bytes = b""

    @staticmethod
    def pack(
        start: int,
        logprobs: NDArray[np.floating],
        top_ids: NDArray[np.integer],
        top_logprobs: NDArray[np.floating],
        asked: NDArray[np.floating],
    ) -> PromptLogprobs:
        return PromptLogprobs(
            start,
            logprobs.astype(_FLOATS).tobytes(),
            top_ids.astype(_IDS).tobytes(),
            top_logprobs.astype(_FLOATS).tobytes(),
            asked.astype(_FLOATS).tobytes(),
        )

    def check(self, start: int, tokens: int, top: int, asked: int, vocabulary: int) -> None:
        """Check that the log-probabilities begin at `start`, that they have `tokens` positions with
        `top` and `asked` entries each, and that all ids are within the vocabulary.

        Raises: WireError otherwise.
        """
        sizes = (len(self.logprobs), len(self.top_ids), len(self.top_logprobs), len(self.asked))
        if self.start != start or sizes != tuple(
            4 * tokens * each for each in (1, top, top, asked)
        ):
            text = f"the handoff's prompt logprobs are {sizes} bytes from {self.start}"
            raise WireError(
                f"{text}, not of {tokens} tokens and {top} and {asked} at each from {start}"
            )
        ids = np.frombuffer(self.top_ids, _IDS)
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            raise WireError(
                f"the handoff's prompt logprobs name tokens outside 0..{vocabulary - 1}"
            )

    def tokens(
        self, prompt: Sequence[int] | NDArray[np.integer], asked_ids: Sequence[int] = ()
    ) -> Iterator[ScoredToken]:
        """Yield the tokens of `prompt` from `start` on, with their log-probabilities."""
        ids: list[int] = np.asarray(prompt[self.start :]).tolist()
        # The token at `start` has no log-probability. The next token has the first one.
        yield ScoredToken(ids[0], None, [], [])
        logprobs = np.frombuffer(self.logprobs, _FLOATS)
        shape = (len(logprobs), -1) if len(logprobs) else (0, 0)
        top_ids = np.frombuffer(self.top_ids, _IDS).reshape(shape)
        top = np.frombuffer(self.top_logprobs, _FLOATS).reshape(shape)
        asked = np.frombuffer(self.asked, _FLOATS).reshape(shape)
        for i, logprob in enumerate(logprobs):
            pairs = list(zip(top_ids[i].tolist(), top[i].tolist(), strict=True))
            named = list(zip(asked_ids, asked[i].tolist(), strict=True))
            yield ScoredToken(ids[i + 1], float(logprob), pairs, named)


def size_bytes(tokens: int, top: int, asked: int) -> int:
    return tokens * (4 + 8 * top + 4 * asked)
