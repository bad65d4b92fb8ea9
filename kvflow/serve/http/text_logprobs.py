"""The `logprobs` object of a text completion, in the format of /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvflow.aio import in_turns
from kvflow.http.growing import GrowingArray
from kvflow.http.prompt_fields import PromptIds
from kvflow.node.prompt_logprobs import PromptLogprobs, ScoredToken
from kvflow.serve.engine.scheduler.params import TokenOut

TokenBytes = Callable[[int], bytes]


class TextLogprobs:
    """Four arrays with one entry per token: the echoed prompt first, then the new tokens."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._end = 0  # length of the text so far, in characters
        self._arrays = {
            name: GrowingArray()
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }

    def add(self, token: TokenOut | ScoredToken) -> None:
        for name, element in self._next(token).items():
            self._arrays[name].add(element)

    async def add_prompt(self, scores: PromptLogprobs, prompt: PromptIds) -> None:
        async for token in in_turns(scores.tokens(prompt)):
            self.add(token)

    def alone(self, tokens: Iterable[TokenOut]) -> dict[str, Any]:
        """Return arrays for only the next tokens, for one chunk of a stream."""
        found = [self._next(token) for token in tokens]
        return {name: [one[name] for one in found] for name in self._arrays}

    def all(self) -> dict[str, Any]:
        return dict(self._arrays)

    def _next(self, token: TokenOut | ScoredToken) -> dict[str, Any]:
        spelled, start = self._token_bytes(token.token_id), self._end
        self._end += _characters(spelled)
        top: dict[str, float] = {}
        # Tokens may share a label. The most likely one comes first, and keeps it.
        for token_id, logprob in token.top_logprobs:
            top.setdefault(_label(self._token_bytes(token_id)), logprob)
        return {
            "tokens": _label(spelled),
            "token_logprobs": token.logprob,
            # The first token of a prompt has no log-probability, and so no alternatives.
            "top_logprobs": None if token.logprob is None else top,
            "text_offset": start,
        }


def _label(token: bytes) -> str:
    # With U+FFFD, parts of characters would share a label. OpenAI spells out their bytes.
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _characters(token: bytes) -> int:
    """Return how many characters begin in these UTF-8 bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in token)
