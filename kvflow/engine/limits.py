"""What a request may ask of one model and one pool, checked before anything is opened for it."""

from __future__ import annotations

import numpy as np

from kvflow.engine.load import LoadedModel
from kvflow.engine.params import SamplingParams
from kvflow.engine.sequence import Prompt
from kvflow.protocols.errors import CapacityError, MisuseError


class Limits:
    """The context and the vocabulary of the model, the pages of the pool."""

    def __init__(self, model: LoadedModel, page_size: int, num_pages: int) -> None:
        self._context, self._vocabulary = model.context_length, model.vocab_size
        self._page_size, self._num_pages = page_size, num_pages

    def check_prompt(self, prompt: Prompt) -> None:
        """Raises: MisuseError (empty, unknown token ids), CapacityError (longer than the context or the pool)."""
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size:
            raise MisuseError("prompt: it has no tokens")
        if ids.dtype.kind not in "iu":
            raise MisuseError("prompt: token ids must be integers")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise MisuseError(f"prompt: token ids must be within 0..{self._vocabulary - 1}")
        if ids.size >= self._context:
            raise CapacityError("prompt tokens (one new token needs room in the context)", ids.size, self._context - 1)
        if (pages := -(-ids.size // self._page_size)) > self._num_pages:
            raise CapacityError("pages for the prompt", pages, self._num_pages)

    def new_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """`max_new_tokens`, cut to what the context has room for."""
        return min(params.max_new_tokens, self._context - len(prompt))

    def worst_pages(self, prompt: Prompt, new_tokens: int) -> int:
        """Pages of prompt and new tokens; the last new token is never fed back."""
        return -(-(len(prompt) + new_tokens - 1) // self._page_size)
