"""What prefill hands over to decode besides the pages (I9): bytes to the room, a struct to the two engines."""

from __future__ import annotations

import msgspec

from kvflow.engine.scheduler.params import SamplingParams
from kvflow.engine.scheduler.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import WireError


class HandOff(msgspec.Struct, frozen=True, tag="handoff.v1", kw_only=True):
    """The first token, sampled by prefill from the prompt's last logits, the prompt's token counts, and its
    log-probabilities where they were asked for."""

    first_token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    asked_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> HandOff:
        """Raises: WireError for bytes that are not a hand-over; the size limit of messages bounds them."""
        try:
            return _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise WireError(f"cannot decode a {len(data)}-byte hand-over: {error}") from None

    def check(self, prompt_tokens: int, params: SamplingParams, vocabulary: int) -> None:
        """Raises: WireError unless it is for a prompt of `prompt_tokens` and holds what `params` ask for."""
        if self.prompt_tokens != prompt_tokens:
            text = f"the hand-over is for a prompt of {self.prompt_tokens} tokens, not {prompt_tokens}"
            raise WireError(text)
        if not 0 <= self.first_token < vocabulary:
            raise WireError(f"the hand-over's first token {self.first_token} is outside 0..{vocabulary - 1}")
        if any(not 0 <= token_id < vocabulary for token_id, _ in (*self.top_logprobs, *self.asked_logprobs)):
            raise WireError(f"the hand-over's top logprobs name tokens outside 0..{vocabulary - 1}")
        if tuple(token_id for token_id, _ in self.asked_logprobs) != params.logprob_token_ids:
            raise WireError("the hand-over's logprobs are not of the token ids that were asked for")
        if (start := params.prompt_logprobs_from) is not None:
            if self.prompt_logprobs is None:
                raise WireError("the hand-over has no logprobs of the prompt; prefill may be of another version")
            top, asked = min(params.logprobs or 0, vocabulary), len(params.logprob_token_ids)
            self.prompt_logprobs.check(start, prompt_tokens - 1 - start, top, asked, vocabulary)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandOff)
