"""The limits that a model and a pool set for a request, checked before a room is opened for it.

This module does not import torch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from kvflow.node.handoff import MAX_HIDDEN_BYTES
from kvflow.node.prompt_logprobs import MAX_BYTES, size_bytes
from kvflow.protocols.errors import CapacityError, MisuseError
from kvflow.protocols.wire.messages import MAX_PAGES_PER_ROOM
from kvflow.serve.engine.model.sequence import Prompt
from kvflow.serve.engine.scheduler.params import MAX_STOP_IDS, BadWords, LogitBias, SamplingParams

_POOL = "the KV pool (--num-pages, --pool-bytes, --mem-fraction)"
# Clients look for these words, litellm and langchain-openai among them: their users' code shortens
# the conversation then.
_TOO_LONG = "the prompt is too long"
# Limit on the float32 logits of one prompt, in bytes, if one step computes the whole prompt.
MAX_LOGITS_BYTES = 1 << 30


class EngineLimits:
    """The limits set by a model's context and vocabulary, and by a pool's pages."""

    def __init__(
        self,
        context_length: int,
        vocab_size: int,
        page_size: int,
        num_pages: int,
        hidden_size: int = 0,
        *,
        whole_prompts: bool = False,
    ) -> None:
        """`hidden_size` is the width of the last hidden states, 0 if they are not available.

        With `whole_prompts`, a single step computes a prompt and the logits of its scored tokens.
        """
        self.context_length, self.pool_tokens = context_length, page_size * num_pages
        self._vocabulary, self._page_size = vocab_size, page_size
        self._hidden_size, self._whole_prompts = hidden_size, whole_prompts

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that a prompt and its completion may have together.

        The pool holds one token less, because the last token of a completion is never fed back.
        """
        return min(self.context_length, self.pool_tokens + 1)

    def within(self, num_pages: int) -> EngineLimits:
        """Return the same limits for a group of ranks whose smallest pool has `num_pages` pages."""
        found = copy.copy(self)
        found.pool_tokens = min(self.pool_tokens, self._page_size * num_pages)
        return found

    def check_prompt(self, prompt: Prompt) -> None:
        """Check that a prompt has known token ids and fits.

        Raises: MisuseError (empty, unknown token ids), CapacityError (longer than the context or
        the pool).
        """
        if not len(prompt):
            raise MisuseError("the prompt is empty")
        if len(prompt) >= self.context_length:
            text = f"{_TOO_LONG}; prompt tokens (the model's context must hold one new token too)"
            raise CapacityError(text, len(prompt), self.context_length - 1)
        if len(prompt) > (most := min(self.pool_tokens, MAX_PAGES_PER_ROOM * self._page_size)):
            raise CapacityError(f"{_TOO_LONG}; prompt tokens in {_POOL}", len(prompt), most)
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise MisuseError(
                f"prompt: token ids must be a flat list of integers, not {ids.ndim}-d {ids.dtype}"
            )
        self._check_ids("prompt", (int(ids.min()), int(ids.max())))

    def check_new_tokens(self, prompt: Prompt, params: SamplingParams, *, generates: bool) -> None:
        """Check that all of `max_new_tokens` fit, for callers that do not shorten requests.

        With `generates`, the tokens must also fit into the pool, because decode keeps them there.

        Raises: CapacityError.
        """
        if (wanted := len(prompt) + params.max_new_tokens) > self.context_length:
            raise CapacityError(
                "tokens of the model's context for prompt + max_new_tokens",
                wanted,
                self.context_length,
            )
        if generates:
            self.check_total(len(prompt) + max(1, params.max_new_tokens))

    def check_total(self, tokens: int) -> None:
        """Check that a prompt and completion of `tokens` tokens fit. Raises: CapacityError."""
        if tokens > self.max_tokens:
            raise CapacityError(
                f"tokens of prompt + max_new_tokens in {_POOL}", tokens, self.max_tokens
            )

    def check_sampling(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check the sampling parameters against the limits of the model and of handoffs.

        Raises: MisuseError for token ids outside the vocabulary, bad words that may leave no token
        to choose, a position outside the prompt, more log-probabilities than a handoff holds, or
        hidden states that the model does not return.
        """
        if params.hidden_states and not 0 < self._hidden_size <= MAX_HIDDEN_BYTES // 4:
            raise MisuseError(
                "return_hidden_states: the hidden states of this model are not to be had; leave it "
                "out"
            )
        if params.prompt_logprobs_from is not None:
            self._check_scores(len(prompt), params.prompt_logprobs_from, params)
        self._check_ids("token_ids_logprob", params.logprob_token_ids)
        self._check_ids("logit_bias", LogitBias(params.logit_bias).extent)
        self._check_ids("bad_words", BadWords(params.bad_words).extent)
        if params.bad_words and len(params.bad_words) + MAX_STOP_IDS >= self._vocabulary:
            text = (
                f"bad_words: {len(params.bad_words)} of them may leave none of {self._vocabulary} "
                "tokens to choose from"
            )
            raise MisuseError(text)

    def _check_scores(self, prompt_tokens: int, start: int, params: SamplingParams) -> None:
        if not 0 <= start < prompt_tokens:
            raise MisuseError(
                f"logprob_start_len {start} is outside the prompt, 0..{prompt_tokens - 1}"
            )
        tokens = prompt_tokens - 1 - start
        top = params.logprobs or 0
        asked = len(params.logprob_token_ids)
        if (size := self.scores_bytes(prompt_tokens, params)) > MAX_BYTES:
            others = f" and {asked} asked for" if asked else ""
            text = (
                f"logprobs of {tokens} prompt tokens, {top} top ones{others} at each, are {size} "
                "bytes"
            )
            raise MisuseError(
                f"{text}, limit {MAX_BYTES}; ask for fewer at each, or from a later token on"
            )
        logits_bytes = 4 * self._vocabulary * (prompt_tokens - start)
        if self._whole_prompts and logits_bytes > MAX_LOGITS_BYTES:
            first = prompt_tokens - MAX_LOGITS_BYTES // (4 * self._vocabulary)
            raise MisuseError(
                f"logprobs of {tokens} prompt tokens: this model computes a prompt in one step, "
                f"with {logits_bytes} bytes of logits, limit {MAX_LOGITS_BYTES}; ask from token "
                f"{first} on"
            )

    def scores_bytes(self, prompt_tokens: int, params: SamplingParams) -> int:
        if params.prompt_logprobs_from is None:
            return 0
        top = min(params.logprobs or 0, self._vocabulary)
        return size_bytes(
            prompt_tokens - 1 - params.prompt_logprobs_from, top, len(params.logprob_token_ids)
        )

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < self._vocabulary:
                text = (
                    f"{name}: token id {token_id} is outside the model's vocabulary, "
                    f"0..{self._vocabulary - 1}"
                )
                raise MisuseError(text)

    def new_tokens(self, prompt: Prompt, params: SamplingParams) -> int:
        """Return `max_new_tokens`, cut to the context, but at least 1: prefill chooses a token."""
        return min(max(1, params.max_new_tokens), self.context_length - len(prompt))

    def worst_pages(self, prompt: Prompt, new_tokens: int) -> int:
        """Return the number of pages that the tokens need. The last new token is never fed back."""
        return -(-(len(prompt) + new_tokens - 1) // self._page_size)
