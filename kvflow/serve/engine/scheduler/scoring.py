"""The log-probabilities of a prompt, collected chunk by chunk in the model thread."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray

from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.serve.engine.model.sequence import Sequence

# Limit on the tokens scored in one step, because each needs logits for the whole vocabulary.
TOKENS_PER_STEP = 256
# The number of tokens whose float32 log-probabilities are in memory at a time.
_SLICE = 32


class PromptScorer:
    """Collects the log-probabilities of one prompt's tokens after position `start`.

    At each position, it also collects those of the `top` most likely tokens and of the `asked`
    token ids.
    """

    def __init__(self, sequence: Sequence, start: int, top: int, asked: tuple[int, ...]) -> None:
        self._sequence, self._start, self._top = sequence, start, top
        self._asked = torch.from_numpy(np.array(asked, dtype=np.int64))
        self.scores = PromptLogprobs(start, b"")  # complete after the last chunk
        self._parts: list[tuple[NDArray[np.generic], ...]] = []

    def logits_wanted(self, count: int) -> int:
        """Return how many of the next `count` tokens need logits. These are the last ones."""
        computed = self._sequence.computed
        return max(0, computed + count - max(self._start, computed))

    def add(self, logits: torch.Tensor, end: int) -> None:
        """Add the `logits` [tokens, vocabulary] of the last tokens before position `end`."""
        following = self._sequence.tokens[
            end - len(logits) + 1 : min(end + 1, self._sequence.prompt_length)
        ]
        vocabulary = logits.shape[-1]
        for at in range(0, len(following), _SLICE):
            targets = torch.from_numpy(following[at : at + _SLICE]).to(logits.device)
            logprobs = torch.log_softmax(logits[at : at + len(targets)].float(), dim=-1)
            top, ids = logprobs.topk(min(self._top, vocabulary), dim=-1)
            # A token with an embedding but no logit is never generated: its logprob is -inf.
            padded = F.pad(logprobs, (0, 1), value=-torch.inf)
            own = padded.gather(-1, targets[:, None].clamp(max=vocabulary))[:, 0]
            asked = padded[:, self._asked.to(logits.device).clamp(max=vocabulary)]
            self._parts.append(tuple(found.numpy(force=True) for found in (own, ids, top, asked)))
        if end == self._sequence.prompt_length and self._parts:
            self.scores = PromptLogprobs.pack(
                self._start, *map(np.concatenate, zip(*self._parts, strict=True))
            )
            self._parts.clear()
