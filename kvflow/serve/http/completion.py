"""One completion as it grows: tokens of the engine in, pieces of text with ids and logprobs out."""

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
    """The addition of one engine step: a token, or no token for a request of the prompt alone.

    `finish` is "length", "stop", "abort" or None; `matched` is the stop string or token id.
    """

    text: str
    tokens: tuple[TokenOut, ...]
    finish: str | None = None
    matched: str | int | None = None
    hidden_states: PackedArray | None = None  # if requested: of the last token only
    cached_tokens: int = 0  # in the first delta: cached tokens of the prompt


class Completion:
    """The sum of the deltas of one choice.

    Tokens are counted and not kept: their `CompletionCall` encodes what the answer needs of each
    one as it arrives, in a tenth of the memory of a token's log-probabilities as objects."""

    def __init__(self) -> None:
        self.generated = 0  # tokens
        self.finish: str | None = None
        self.matched: str | int | None = None
        self.hidden_states: PackedArray | None = None
        self.cached_tokens = 0  # of the prompt; known with the first token
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        """The text so far. Each access makes a copy."""
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
    """Yield the deltas of one choice, and close the engine's iterator once a stop string is
    complete.

    A token that ends the completion by its id carries no text, unless the text is to include its
    end. The prompt's log-probabilities go to `scored` before the first delta.
    """
    async with aclosing(tokens) as source:
        try:
            async for arrived in source:
                token = arrived
                if token.prompt_logprobs is not None:
                    await scored(token.prompt_logprobs)
                    token = msgspec.structs.replace(token, prompt_logprobs=None)
                # Callers keep tokens for a while, and the hidden states of a long answer are too
                # large for that.
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
            # Prefill received /abort_request, perhaps before this leg arrived here. The client then
            # gets an answer with the reason "abort", as for an abort at this worker.
            yield Delta("", (), ABORT)
