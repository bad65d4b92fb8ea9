"""Prompts that decode computes itself, in chunks between the steps of its other requests.

Such a request has no room: no prefill computes the prompt, and nothing is transferred. Decode
chooses the first token too. A draw depends only on the seed and the position, so the token is the
one that prefill would have chosen.
"""

from __future__ import annotations

from kvflow.memory.allocator import PageAllocator
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import RefusedError
from kvflow.protocols.pages.layout import Places
from kvflow.serve.cache.prefix import Prefix
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.model.sequence import Prompt, Sequence
from kvflow.serve.engine.scheduler.params import EngineLocalPrompts, SamplingParams


class LocalPrompts:
    """Decides which prompts decode computes, and takes their places.

    `chunk` is the number of prompt tokens that one step computes at most while other requests
    decode. It is 0 if decode computes no prompts: some models compute a prompt as a whole, which
    would make all other requests wait. States of other models depend on how the prompt is divided,
    so prefill's first token could differ.
    """

    def __init__(
        self, model: LoadedModel, pool: PagedPool, pages: PageAllocator, chunk: int
    ) -> None:
        self.chunk = 0 if model.whole_prompts or model.has_states else chunk
        self._name, self._layout = model.name, pool.layout
        self._places = pool.places_over(pages)
        # The cache keeps no rows, and its pages are useless without them.
        self._caches = not pool.layout.num_rows
        self.prompts = 0
        self.tokens = 0  # the model thread counts them

    def report(self) -> EngineLocalPrompts:
        return EngineLocalPrompts(chunk=self.chunk, prompts=self.prompts, tokens=self.tokens)

    def check(self, params: SamplingParams) -> None:
        """Raises: RefusedError if a pair has to serve this request."""
        if not self.chunk:
            raise RefusedError(
                f"compute_prompt: this decode computes no prompts of {self._name}; a pair does"
            )
        if params.prompt_logprobs_from is not None:
            raise RefusedError(
                "compute_prompt: decode returns no logprobs of a prompt that it computes; a pair "
                "does"
            )

    def most_cached(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the cache may supply at most.

        The model must compute the last one, from which the first token is chosen.
        """
        return len(prompt) - 1 if self._caches else 0

    def take(self, sequence: Sequence, prefix: Prefix | None) -> Places:
        """Take the pages of a whole prompt besides its cached ones, and a row if the pool has rows.

        Returns the taken places, which the sequence has afterwards.

        Raises: CapacityError if too few are free; nothing is taken then.
        """
        if prefix is not None:
            sequence.begin_with(prefix.pages)
        needed = sequence.pages_missing(sequence.prompt_length)
        counts = (needed, 1) if self._layout.num_rows else (needed,)
        places = self._layout.split(self._places.take_room(counts, sequence.owner))
        sequence.add(places)
        self.prompts += 1
        return places
