"""Conversion between text and tokens. Prompts are encoded in a thread."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvflow.aio import Threads
from kvflow.http.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from kvflow.http.prompt_fields import PromptIds
from kvflow.serve.engine.scheduler.params import BadWords, SamplingParams
from kvflow.serve.http.tools.answers import takes_tools, template_text
from kvflow.serve.http.tools.conversation import (
    for_template,
    with_arguments_as_text,
    with_one_text,
)

MAX_BAD_WORDS = 1024


class Detokenizer(Protocol):
    """Incremental detokenization with stop strings (see `engine.scheduler.text.TextStream`)."""

    stopped: str | None

    @property
    def include_stop(self) -> bool:
        """True if the text is to include the stop string or token that ends it."""

    def feed(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class NullDetokenizer:
    """A detokenizer for a model without a tokenizer. Its text is always empty."""

    stopped: str | None = None
    include_stop = False

    def feed(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class ThreadedTokenizer:
    """A tokenizer in one thread: long prompts take time, and fast tokenizers are not re-entrant."""

    def __init__(self, tokenizer: Any | None, context_length: int = 1 << 20) -> None:
        self._tokenizer = tokenizer
        if tokenizer is not None:
            longest = max((len(entry) for entry in tokenizer.get_vocab()), default=1)
        else:
            longest = 1
        self._context_length = context_length
        # A longer text cannot fit into the context, and encoding it could take gigabytes of memory.
        self._max_characters = context_length * longest
        self._token_bytes: dict[int, bytes] = {}  # at most one entry per token of the vocabulary
        self._bytes_of: Callable[[int], bytes] | None = None
        self._thread = Threads("text")

    async def encode(self, text: str, *, param: str, add_special_tokens: bool = True) -> PromptIds:
        """Return the token ids of a plain prompt. Errors name `param`, the body field it came from.

        Raises: RequestError if the model has no tokenizer, or the text cannot fit into the context.
        """
        tokenizer = self._require()
        self._check_length(len(text), param)

        def encode() -> PromptIds:
            return np.array(
                tokenizer.encode(text, add_special_tokens=add_special_tokens), dtype=np.uint32
            )

        def encode_long() -> PromptIds:
            (found,) = tokenizer.backend_tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            if len(found) > self._context_length:
                raise _too_long(len(found), "tokens", self._context_length, param)
            return np.array(found.ids, dtype=np.uint32)

        return await self._thread.ask(encode_long if self._is_long(text) else encode)

    def _is_long(self, text: str) -> bool:
        # The backend counts tokens without the GIL, because it makes no Python objects for them. A
        # backend that truncates or pads would count wrongly.
        if len(text) <= self._context_length:
            return False
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and backend.truncation is None and backend.padding is None

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids. Raises: RequestError if the model has no tokenizer."""
        tokenizer = self._require()
        return await self._thread.ask(
            lambda: str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        )

    async def encode_words(self, words: Sequence[str]) -> BadWords:
        """Return the token ids of each word at the start of a text.

        Like vLLM, also return the ids that the word has after a space, if their number is the same
        and the first id differs. Raises: RequestError.
        """
        if not words:
            return BadWords()
        tokenizer = self._require()
        if len(words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words: {len(words)} entries, limit {MAX_BAD_WORDS}", param="bad_words"
            )
        self._check_length(sum(map(len, words)), "bad_words")

        def encode() -> BadWords:
            found: list[tuple[int, ...]] = []
            for word in words:
                plain, inside = (
                    tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False))
                    for prefix in ("", " ")
                )
                if not plain:
                    raise RequestError(
                        f"bad_words: {word[:40]!r} has no tokens; leave it out", param="bad_words"
                    )
                found.append(plain)
                if inside[0] != plain[0] and len(inside) == len(plain):
                    found.append(inside)
            return BadWords(found)

        return await self._thread.ask(encode)

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any],
        tools: Sequence[dict[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> PromptIds:
        """Render messages with the chat template. Return the token ids. Raises: RequestError."""
        tokenizer = self._require()
        plain = [for_template(i, message) for i, message in enumerate(messages)]
        if getattr(tokenizer, "chat_template", None) is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        template = template_text(tokenizer)
        if "message.thinking" in template:
            plain = [with_one_text(message) for message in plain]
        if tools and not takes_tools(template):
            raise RequestError("tools: this model's chat template takes none", param="tools")
        self._check_length(sum(map(_characters, plain)), "messages")
        self._check_length(len(str(tools)), "tools")
        _check_variables(tokenizer, variables)

        def render(chat: list[dict[str, Any]]) -> PromptIds:
            made = tokenizer.apply_chat_template(
                chat,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                return_dict=True,
                **variables,
            )
            return np.array(made["input_ids"], dtype=np.uint32)

        def render_any() -> PromptIds:
            try:
                return render(plain)
            except TypeError:
                # DeepSeek's templates append the arguments of a call to a text.
                if all(message.get("tool_calls") is None for message in plain):
                    raise
                return render(with_arguments_as_text(plain))

        # A template is code that comes with the model. On unexpected messages, it may raise any of
        # these errors.
        try:
            return await self._thread.ask(render_any)
        except (
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
            _template_error(),
        ) as error:
            raise RequestError(
                f"the chat template refused the messages: {error}", param="messages"
            ) from None

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._max_characters:
            raise _too_long(characters, "characters", self._max_characters, param)

    def detokenizer(self, params: SamplingParams) -> Detokenizer:
        """Return a detokenizer. Raises: RequestError for stop strings without a tokenizer."""
        if self._tokenizer is None:
            if params.stop:
                text = "stop strings need a tokenizer, and this model has none; use stop_token_ids"
                raise RequestError(text, param="stop")
            return NullDetokenizer()
        # A server without a tokenizer need not have the packages that this imports.
        from kvflow.serve.engine.scheduler.text import TextStream

        return TextStream(
            self._tokenizer,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_new_tokens,
            include_stop=params.include_stop,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, from a cache: logprobs name up to twenty per new token."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._find_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token. An incomplete character becomes U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _find_bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        if self._bytes_of is None:
            from kvflow.serve.engine.scheduler.token_bytes import TokenBytes

            self._bytes_of = TokenBytes(self._tokenizer)
        return self._bytes_of(token_id)

    def close(self) -> None:
        self._thread.close()

    def _require(self) -> Any:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer; send input_ids")
        return self._tokenizer


def _too_long(count: int, units: str, limit: int, param: str) -> RequestError:
    text = f"the text has {count} {units}; at most {limit} fit the model's context"
    return RequestError(text, param=param, reason=CONTEXT_LENGTH_EXCEEDED)


def _characters(message: dict[str, Any]) -> int:
    return len(message["content"]) + len(str(message.get("tool_calls", "")))


def _check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    known = inspect.signature(tokenizer.apply_chat_template).parameters if variables else {}
    for name in variables:
        if name in known and name != "documents":
            text = (
                f"chat_template_kwargs: {name[:40]!r} is an argument of the tokenizer and no "
                "variable of a template"
            )
            raise RequestError(text, param="chat_template_kwargs")


def _template_error() -> type[Exception]:
    try:
        from jinja2 import TemplateError
    except ImportError:
        return ValueError
    return TemplateError
