"""The chat template of --chat-template, in place of the model's own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from kvflow.protocols.errors import MisuseError

_ANY_CHAT = [{"role": "user", "content": "a"}]


def check_template(given: str) -> None:
    """Check that the template `given`, a file or the template itself, can be read.

    Raises: MisuseError if it cannot.
    """
    if given:
        _text_of(given)


def with_template(tokenizer: Any | None, given: str) -> Any | None:
    """Give a tokenizer the chat template `given`, a file or the template itself, and return it.

    Raises: MisuseError if the template cannot be read or parsed, or if there is no tokenizer.
    """
    if not given:
        return tokenizer
    if tokenizer is None:
        raise MisuseError("--chat-template: this model has no tokenizer")
    tokenizer.chat_template = _text_of(given)
    # Importing jinja2 takes time, and few servers need it before their first chat.
    from jinja2 import TemplateError, TemplateSyntaxError

    # Only a syntax error is certain to be one: the template may refuse this chat for good reasons.
    with contextlib.suppress(TemplateError, TypeError, ValueError, LookupError):
        try:
            tokenizer.apply_chat_template(_ANY_CHAT, tokenize=False)
        except TemplateSyntaxError as error:
            raise MisuseError(f"--chat-template: line {error.lineno}: {error.message}") from None
    return tokenizer


def _text_of(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise MisuseError(f"--chat-template {given}: {error.strerror}") from None
    except ValueError as error:
        raise MisuseError(f"--chat-template {given}: {error}") from None
