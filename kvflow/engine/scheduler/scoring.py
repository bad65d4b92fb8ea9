"""The log-probabilities of a prompt, collected chunk by chunk in the model thread."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvflow.engine.model.sequence import Sequence
from kvflow.engine.scheduler.prompt_logprobs import PromptLogprobs

TOKENS_PER_STEP = 256  # scored in one step: the logits of one token are as wide as the vocabulary
_SLICE = 32  # tokens whose float32 log-probabilities exist at a time


class PromptScorer:
    """Of the tokens behind position `start` of one prompt, with the `top` most likely ones at each."""

    def __init__(self, sequence: Sequence, start: int, top: int) -> None:
        self._sequence, self._start, self._top = sequence, start, top
        self.scores = PromptLogprobs(start, b"")  # complete after the last chunk
        self._parts: list[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]] = []

    def logits_wanted(self, count: int) -> int:
        """Of the last how many of the next `count` tokens logits are needed."""
        computed = self._sequence.computed
        return max(0, computed + count - max(self._start, computed))

    def add(self, logits: torch.Tensor, end: int) -> None:
        """`logits` [tokens, vocabulary] of the tokens before position `end`, which follow those already added."""
        following = self._sequence.tokens[end - len(logits) + 1 : min(end + 1, self._sequence.prompt_length)]
        for at in range(0, len(following), _SLICE):
            targets = torch.from_numpy(following[at : at + _SLICE])
            logprobs = torch.log_softmax(logits[at : at + len(targets)].float(), dim=-1)
            top, ids = logprobs.topk(min(self._top, logprobs.shape[-1]), dim=-1)
            own = logprobs.gather(-1, targets[:, None])[:, 0]
            self._parts.append((own.numpy(), ids.numpy(), top.numpy()))
        if end == self._sequence.prompt_length and self._parts:
            self.scores = PromptLogprobs.pack(self._start, *map(np.concatenate, zip(*self._parts, strict=True)))
            self._parts.clear()
