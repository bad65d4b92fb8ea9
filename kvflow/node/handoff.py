"""The handoff that prefill sends to decode along with the pages (I9). A room carries it as bytes,
and the two engines use it as a struct.

Every field is a copy and not a view of the message, so the struct stays valid for as long as a
request keeps it.
"""

from __future__ import annotations

import msgspec

from kvflow.node.packed_array import PackedArray
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import MisuseError, WireError
from kvflow.protocols.wire.codec import UNDECODABLE

# Enough for 32 tokens of 8,192 bfloat16 numbers each. The whole handoff is at most 1 MiB.
MAX_HIDDEN_BYTES = 1 << 19
MAX_DRAFT_ENTRIES = 1 << 12


class HandOff(msgspec.Struct, frozen=True, tag="handoff.v1", kw_only=True):
    """The first token, the prompt's token counts and, if the request asks for them,
    log-probabilities. Prefill sampled the first token from the prompt's last logits.

    `sampling` is the `SamplingParams.first_token_digest` of prefill's request, if the engine sends
    it. A room matches its two halves by id and prompt only, so decode compares this digest to check
    that both halves ask for the same sampling.

    `hidden_states` and the `draft_*` fields are optional. They are for engines that decode
    speculatively. `hidden_states`, floating-point [tokens, hidden], are the model's last hidden
    states for the last `tokens` tokens of the prompt. `draft_probabilities` (float32) and
    `draft_token_ids` (int32 or int64) have the same shape, [k] or [steps, k]: they are the
    candidates after the first token.
    """

    first_token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    asked_logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    hidden_states: PackedArray | None = None
    draft_probabilities: PackedArray | None = None
    draft_token_ids: PackedArray | None = None
    sampling: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes for the room.

        Raises: MisuseError that names a field with a wrong dtype, shape or size.
        """
        if fault := self._fault():
            raise MisuseError(f"the handoff's {fault}")
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> HandOff:
        """Decode a handoff. The size limit of messages also bounds its fields.

        Raises: WireError for bytes that are not a handoff, or for a field with a wrong dtype,
        shape or size.
        """
        try:
            found = _DECODER.decode(data)
        except UNDECODABLE as error:
            raise WireError(f"cannot decode a {len(data)}-byte handoff: {error}") from None
        if fault := found._fault():
            raise WireError(f"the handoff's {fault}")
        return found

    def check_fits(
        self, prompt_tokens: int, vocabulary: int, hidden_size: int | None = None
    ) -> None:
        """Check that the handoff fits a prompt of `prompt_tokens` tokens, and a model with this
        vocabulary size and, if given, this hidden size.

        Raises: WireError if it does not fit.
        """
        if self.prompt_tokens != prompt_tokens:
            text = (
                f"the handoff is for a prompt of {self.prompt_tokens} tokens, not {prompt_tokens}"
            )
            raise WireError(text)
        if not 0 <= self.cached_tokens <= prompt_tokens:
            raise WireError(
                f"the handoff's cached_tokens {self.cached_tokens} are outside 0..{prompt_tokens}"
            )
        if not 0 <= self.first_token < vocabulary:
            raise WireError(
                f"the handoff's first token {self.first_token} is outside 0..{vocabulary - 1}"
            )
        if (
            self.draft_token_ids is not None
            and int(self.draft_token_ids.array().max()) >= vocabulary
        ):
            raise WireError(
                f"the handoff's draft_token_ids name tokens outside 0..{vocabulary - 1}"
            )
        hidden = self.hidden_states
        if hidden is not None and hidden_size is not None and hidden.shape[1] != hidden_size:
            text = f"the handoff's hidden_states are of {hidden.shape[1]} numbers a token"
            raise WireError(f"{text}, those of the model of {hidden_size}")

    def _fault(self) -> str:
        for name in ("hidden_states", "draft_probabilities", "draft_token_ids"):
            packed: PackedArray | None = getattr(self, name)
            if packed is not None and packed.fault:
                return f"{name}: {packed.fault}"
        return self._hidden_fault() or self._draft_fault()

    def _hidden_fault(self) -> str:
        if (hidden := self.hidden_states) is None:
            return ""
        if hidden.dtype.startswith("int") or len(hidden.shape) != 2:
            return (
                f"hidden_states: {hidden.shape} of {hidden.dtype} are not [tokens, hidden] of "
                "floating-point numbers"
            )
        if hidden.shape[0] > self.prompt_tokens:
            return (
                f"hidden_states: of {hidden.shape[0]} tokens, limit {self.prompt_tokens} (the "
                "prompt)"
            )
        if len(hidden.data) > MAX_HIDDEN_BYTES:
            return (
                f"hidden_states: {len(hidden.data)} bytes, limit {MAX_HIDDEN_BYTES}; hand over "
                "fewer tokens"
            )
        return ""

    def _draft_fault(self) -> str:
        probabilities, ids = self.draft_probabilities, self.draft_token_ids
        if probabilities is None or ids is None:
            missing = "draft_probabilities" if probabilities is None else "draft_token_ids"
            if probabilities is ids:
                return ""
            return f"{missing}: missing; probabilities and token ids go together"
        if probabilities.dtype != "float32" or ids.dtype not in ("int32", "int64"):
            wanted = "float32 and int32 or int64"
            return (
                f"draft_probabilities, draft_token_ids: {probabilities.dtype} and {ids.dtype}, not "
                f"{wanted}"
            )
        if probabilities.shape != ids.shape or len(ids.shape) > 2:
            return (
                f"draft_token_ids: {ids.shape}, and {probabilities.shape} of probabilities, are "
                "not [k] or [steps, k]"
            )
        given = probabilities.array()
        if given.size > MAX_DRAFT_ENTRIES:
            return f"draft_probabilities: {given.size} entries, limit {MAX_DRAFT_ENTRIES}"
        # NaN fails this check too, because every comparison with it is false.
        if not bool(((given >= 0) & (given <= 1)).all()):
            return "draft_probabilities: a number is outside 0..1"
        return "draft_token_ids: a token id is below 0" if int(ids.array().min()) < 0 else ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(HandOff)
