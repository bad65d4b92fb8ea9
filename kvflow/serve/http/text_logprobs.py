"""The logprobs of a text completion, in the form that /v1/completions has for them."""

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
    """Four arrays, of the prompt's tokens where the body asks for an echo, and of the new ones."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._end = 0  # of the text so far, in characters
        self._arrays = {
            name: GrowingArray()
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }

    def add(self, token: TokenOut | ScoredToken) -> None:
        for name, element in self._next(token).items():
            self._arrays[name].add(element)

    async def add_prompt(self, scores: PromptLogprobs, prompt: PromptIds) -> None:
        """Add the prompt, a bit at a time: it may be long."""
        async for token in in_turns(scores.tokens(prompt)):
            self.add(token)

    def alone(self, tokens: Iterable[TokenOut]) -> dict[str, Any]:
        """Those of the next tokens, for a chunk of their own."""
        found = [self._next(token) for token in tokens]
        return {name: [one[name] for one in found] for name in self._arrays}

    def all(self) -> dict[str, Any]:
        return dict(self._arrays)

    def _next(self, token: TokenOut | ScoredToken) -> dict[str, Any]:
        spelled, start = self._token_bytes(token.token_id), self._end
        self._end += _characters(spelled)
        top: dict[str, float] = {}
        # Of two tokens with one label the more likely one is named.
        for token_id, logprob in token.top_logprobs:
            top.setdefault(_label(self._token_bytes(token_id)), logprob)
        return {
            "tokens": _label(spelled),
            "token_logprobs": token.logprob,
            "top_logprobs": None if token.logprob is None else top,
            "text_offset": start,
        }


def _label(token: bytes) -> str:
    """A token as a key; a part of a character in OpenAI's way, so that two of them do not become
    one.
    """
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _characters(token: bytes) -> int:
    """How many characters begin in these bytes of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in token)
