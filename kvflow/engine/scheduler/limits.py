"""What a request may ask of one model and one pool, checked before anything is opened for it. No torch in here."""

from __future__ import annotations

import numpy as np

from kvflow.engine.model.sequence import Prompt
from kvflow.engine.scheduler.params import SamplingParams
from kvflow.protocols.errors import CapacityError, MisuseError


class Limits:
    """The context and the vocabulary of the model, the pages of the pool. Cheap checks come first."""

    def __init__(self, context_length: int, vocab_size: int, page_size: int, num_pages: int) -> None:
        self.context_length, self.pool_tokens = context_length, page_size * num_pages
        self._vocabulary, self._page_size, self._num_pages = vocab_size, page_size, num_pages

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises: MisuseError (empty, unknown token ids), CapacityError (longer than the context or the pool)."""
        if not len(prompt):
            raise MisuseError("the prompt is empty")
        if len(prompt) >= self.context_length:
            text = "prompt tokens (one new token needs room in the model's context)"
            raise CapacityError(text, len(prompt), self.context_length - 1)
        if (pages := self.worst_pages(prompt, 1)) > self._num_pages:
            raise CapacityError("pages for the prompt", pages, self._num_pages)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise MisuseError("prompt: token ids must be a list of integers")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise MisuseError(f"prompt: token ids must be within 0..{self._vocabulary - 1}, the vocabulary")

    def check_new_tokens(self, prompt: Prompt, params: SamplingParams, *, generates: bool) -> None:
        """Whether all of `max_new_tokens` fit, for callers who would rather refuse than cut; decode (`generates`) keeps
        them in its pool as well. Raises: CapacityError."""
        if (wanted := len(prompt) + params.max_new_tokens) > self.context_length:
            raise CapacityError(
                "tokens of the model's context for prompt + max_new_tokens", wanted, self.context_length
            )
        if generates and (pages := self.worst_pages(prompt, params.max_new_tokens)) > self._num_pages:
            raise CapacityError("pages for prompt + max_new_tokens", pages, self._num_pages)

    def new_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """`max_new_tokens`, cut to what the context has room for."""
        return min(params.max_new_tokens, self.context_length - len(prompt))

    def worst_pages(self, prompt: Prompt, new_tokens: int) -> int:
        """Pages of prompt and new tokens; the last new token is never fed back."""
        return -(-(len(prompt) + new_tokens - 1) // self._page_size)
