"""Log-probabilities of a prompt's tokens, packed for the hand-over. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES

MAX_BYTES = MAX_HANDOFF_BYTES - (1 << 16)  # the rest is for the first token
_FLOATS, _IDS = np.dtype("<f4"), np.dtype("<i4")


class ScoredToken(NamedTuple):
    """One token of a prompt; `logprob` is None for the first of the tokens asked for, as in
    SGLang's answers.
    """

    token_id: int
    logprob: float | None
    top_logprobs: list[tuple[int, float]]
    asked_logprobs: list[tuple[int, float]]


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of the tokens after position `start`, each given all before it.

    `logprobs` is float32 [tokens]. `top_ids` int32 [tokens, top] and `top_logprobs` float32
    [tokens, top] are the most likely tokens in descending order. `asked` float32 [tokens, ids]
    belongs to the tokens that were asked for by id.
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
        """Check that the start, the sizes and the ids are those asked for.

        Raises: WireError.
        """
        sizes = (len(self.logprobs), len(self.top_ids), len(self.top_logprobs), len(self.asked))
        if self.start != start or sizes != tuple(
            4 * tokens * each for each in (1, top, top, asked)
        ):
            text = f"the hand-over's prompt logprobs are {sizes} bytes from {self.start}"
            raise WireError(
                f"{text}, not of {tokens} tokens and {top} and {asked} at each from {start}"
            )
        ids = np.frombuffer(self.top_ids, _IDS)
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            raise WireError(
                f"the hand-over's prompt logprobs name tokens outside 0..{vocabulary - 1}"
            )

    def tokens(
        self, prompt: Sequence[int] | NDArray[np.integer], asked_ids: Sequence[int] = ()
    ) -> Iterator[ScoredToken]:
        """Yield the tokens of `prompt` from `start` on."""
        ids: list[int] = np.asarray(prompt[self.start :]).tolist()
        # The token at `start` is not scored: the scores begin with the one after it.
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
    """Return the size of the packed log-probabilities in bytes."""
    return tokens * (4 + 8 * top + 4 * asked)
