"""What prefill hands to decode beside the pages (I9): opaque bytes for the room, a struct for the two engines."""

from __future__ import annotations

import msgspec

from kvflow.protocols.errors import WireError


class HandOff(msgspec.Struct, frozen=True, tag="handoff.v1", kw_only=True):
    """The first token, sampled where the prompt's last hidden state was, and what is known about the prompt."""

    first_token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int
    cached_tokens: int = 0

    def encode(self) -> bytes:
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> HandOff:
        """Raises: WireError for bytes that are no hand-over; the message that brought them bounds their number."""
        try:
            return _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise WireError(f"hand-over: {error}") from None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandOff)
