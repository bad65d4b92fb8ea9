"""Checks that decode's engine makes before it continues from a handoff."""

from __future__ import annotations

from kvflow.node.handoff import HandOff
from kvflow.protocols.errors import MisuseError, WireError
from kvflow.serve.engine.scheduler.params import SamplingParams


def check_handoff(
    handoff: HandOff, prompt_tokens: int, params: SamplingParams, vocabulary: int
) -> None:
    """Check that a handoff fits the request.

    Raises: WireError unless it is for a prompt of `prompt_tokens` tokens and holds everything that
    `params` ask for; MisuseError if its token was chosen under different sampling parameters.
    """
    handoff.check_fits(prompt_tokens, vocabulary)
    if handoff.sampling and not params.may_take_first_token(handoff.sampling):
        text = (
            "prefill has chosen the first token by other sampling parameters than those of "
            "this request"
        )
        raise MisuseError(
            f"{text}: send both legs one body, no room id twice, and serve both with the same "
            "--sampling-defaults"
        )
    if any(
        not 0 <= token_id < vocabulary
        for token_id, _ in (*handoff.top_logprobs, *handoff.asked_logprobs)
    ):
        raise WireError(f"the handoff's top logprobs name tokens outside 0..{vocabulary - 1}")
    if tuple(token_id for token_id, _ in handoff.asked_logprobs) != params.logprob_token_ids:
        raise WireError("the handoff's logprobs are not of the token ids that were asked for")
    if params.hidden_states and handoff.hidden_states is None:
        raise WireError("the handoff has no hidden states; prefill may be of another version")
    if (start := params.prompt_logprobs_from) is not None:
        if handoff.prompt_logprobs is None:
            raise WireError(
                "the handoff has no logprobs of the prompt; prefill may be of another version"
            )
        top, asked = min(params.logprobs or 0, vocabulary), len(params.logprob_token_ids)
        handoff.prompt_logprobs.check(start, prompt_tokens - 1 - start, top, asked, vocabulary)
