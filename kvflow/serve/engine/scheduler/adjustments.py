"""Changes of logits before a token is chosen: transformers' logits processors, and grammars."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kvflow.serve.engine.model.grammars import Grammars, Matcher
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.scheduler.params import SamplingParams


class CountPenalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties, which count generated tokens only."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self._prompt_length, self._frequency, self._presence = prompt_length, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` [1, vocabulary] minus the penalties; `input_ids` is int64 [1, tokens]."""
        vocabulary = scores.shape[-1]
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=vocabulary)[
            :vocabulary
        ]
        return scores - self._frequency * counts - self._presence * (counts > 0)


class Adjustments:
    """A callable that changes one request's logits.

    The changes depend on the request's own tokens alone, not on the batch or on earlier calls. The
    model thread makes the calls; `sequence` must hold all tokens before the one to choose.
    """

    def __init__(
        self,
        params: SamplingParams,
        sequence: Sequence,
        eos_ids: frozenset[int],
        matcher: Matcher | None,
        grammars: Grammars,
    ) -> None:
        """`matcher` is the beginning of the request's grammar, which `grammars` compiled."""
        self._params, self._sequence, self._eos_ids = params, sequence, eos_ids
        self._matcher, self.grammars = matcher, grammars
        self._processors: LogitsProcessorList | None = None

    def over(self, sequence: Sequence) -> Adjustments:
        """Return the same for a sequence with the same tokens. Use only the result afterwards."""
        return Adjustments(self._params, sequence, self._eos_ids, self._matcher, self.grammars)

    @property
    def error(self) -> str:
        """Why the grammar cannot go on, or "". Its masks allow every token from then on."""
        return "" if self._matcher is None else self._matcher.error

    @property
    def changes_logits(self) -> bool:
        """True if `__call__` changes anything, as it does not for a grammar alone."""
        return self._params.changes_logits

    def __call__(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        """Return a changed float32 copy of `logits` [vocabulary] for the token at `position`.

        The grammar is left out.
        """
        if self._processors is None:
            self._processors = LogitsProcessorList(self._made(logits.shape[-1], logits.device))
        tokens = torch.from_numpy(self._sequence.tokens[:position]).to(logits.device)
        changed: torch.Tensor = self._processors(
            tokens[None],  # type: ignore[arg-type]
            logits[None].float(),
        )
        return changed[0]

    def answer(self, position: int) -> tuple[Matcher, npt.NDArray[Any]] | None:
        """Return the matcher of the grammar and the tokens before `position`, if it has one."""
        if self._matcher is None:
            return None
        return self._matcher, self._sequence.tokens[self._sequence.prompt_length : position]

    def _made(self, vocabulary: int, device: torch.device) -> list[LogitsProcessor]:
        # An id that has an embedding but no logit is left out: the model never generates it.
        params, prompt_length = self._params, self._sequence.prompt_length
        made: list[LogitsProcessor] = []
        if bias := {
            (token_id,): float(value)
            for token_id, value in params.logit_bias
            if token_id < vocabulary
        }:
            made.append(SequenceBiasLogitsProcessor(bias))  # type: ignore[arg-type]
        if params.repetition_penalty != 1:
            made.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        if params.frequency_penalty or params.presence_penalty:
            made.append(
                CountPenalties(prompt_length, params.frequency_penalty, params.presence_penalty)
            )
        if words := [list(word) for word in params.bad_words if max(word) < vocabulary]:
            made.append(NoBadWordsLogitsProcessor(words))
        if params.min_new_tokens and (ending := sorted(params.ending_ids(self._eos_ids))):
            made.append(
                MinNewTokensLengthLogitsProcessor(
                    prompt_length, params.min_new_tokens, ending, device=str(device)
                )
            )
        return made


def adjustments_of(
    params: SamplingParams,
    sequence: Sequence,
    eos_ids: frozenset[int],
    grammars: Grammars,
) -> Adjustments | None:
    """Return what changes the logits of a request, or None if nothing does.

    Raises: MisuseError if the request has a grammar that cannot be compiled.
    """
    if not params.adjusts:
        return None
    matcher = None
    if params.grammar is not None:
        matcher = grammars.matcher(params.grammar)
    return Adjustments(params, sequence, eos_ids, matcher, grammars)
