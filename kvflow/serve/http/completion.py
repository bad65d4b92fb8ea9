"""One completion as it grows: from the engine's tokens to text, token ids and logprobs."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec

from kvflow.http.aborts import ABORT
from kvflow.node.packed_array import PackedArray
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import AbortedError, Code
from kvflow.serve.engine.scheduler.params import TokenOut
from kvflow.serve.http.tokenizer import Detokenizer


class Delta(msgspec.Struct, frozen=True):
    """The output of one step for a completion.

    It has one token, or none if only the prompt is scored or the completion was aborted.

    `finish` is "length", "stop", "abort" or None. `matched` is the stop string or token id that
    ended the completion.
    """

    text: str
    tokens: tuple[TokenOut, ...]
    finish: str | None = None
    matched: str | int | None = None
    hidden_states: PackedArray | None = None  # the states of the last token, if requested
    cached_tokens: int = 0  # prompt tokens found in the cache; set in the first delta


class Completion:
    """The sum of one choice's deltas, without their tokens.

    The `CompletionCall` encodes each token as it arrives. The encoded form takes a tenth of the
    memory.
    """

    def __init__(self) -> None:
        self.generated = 0  # number of tokens
        self.finish: str | None = None
        self.matched: str | int | None = None
        self.hidden_states: PackedArray | None = None
        self.cached_tokens = 0  # prompt tokens found in the cache; known with the first token
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        """The text so far. Each access copies it."""
        return self._text.getvalue()

    def add(self, delta: Delta) -> None:
        self._text.write(delta.text)
        self.generated += len(delta.tokens)
        self.cached_tokens += delta.cached_tokens
        if delta.finish is not None:
            self.finish = delta.finish
            self.matched = delta.matched
            self.hidden_states = delta.hidden_states


async def detokenize(
    tokens: AsyncGenerator[TokenOut, None],
    detokenizer: Detokenizer,
    scored: Callable[[PromptLogprobs], Awaitable[None]],
    *,
    prompt_only: bool,
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of one choice, and stop when a stop string is complete.

    The engine's iterator is always closed. A token with the finish reason "stop" adds no text,
    unless `include_stop` is set. `scored` receives the prompt's log-probabilities before the first
    delta.
    """
    async with aclosing(tokens) as source:
        try:
            async for arrived in source:
                token = arrived
                if token.prompt_logprobs is not None:
                    await scored(token.prompt_logprobs)
                    token = msgspec.structs.replace(token, prompt_logprobs=None)
                # Hidden states of all tokens of a long answer would take too much memory.
                if (hidden := token.hidden_states) is not None:
                    token = msgspec.structs.replace(token, hidden_states=None)
                if prompt_only:
                    yield Delta(
                        "", (), "length", hidden_states=hidden, cached_tokens=token.cached_tokens
                    )
                    continue
                silent = token.finish_reason == "stop" and not detokenizer.include_stop
                text = "" if silent else detokenizer.feed(token.token_id)
                if token.finish_reason is not None:
                    text += detokenizer.finish()
                if detokenizer.stopped is not None:
                    yield Delta(
                        text, (token,), "stop", detokenizer.stopped, hidden, token.cached_tokens
                    )
                    return
                last = None if token.finish_reason is None else hidden
                yield Delta(
                    text,
                    (token,),
                    token.finish_reason,
                    token.matched_stop,
                    last,
                    token.cached_tokens,
                )
        except AbortedError as error:
            if error.code is not Code.ABORTED:
                raise
            # Prefill received /abort_request. The answer ends as if this worker had received it.
            yield Delta("", (), ABORT)
