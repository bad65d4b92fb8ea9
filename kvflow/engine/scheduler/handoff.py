"""What prefill hands over to decode besides the pages (I9): bytes to the room, a struct to the two engines."""

from __future__ import annotations

import msgspec

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


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandOff)
