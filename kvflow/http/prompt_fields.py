"""Fields of a body that decide what a prompt's tokens are, and with whom it shares cached pages.

A worker and the router in front of it read them alike: the router finds the worker whose cache has
the prompt.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.cache.hashes import Namespace

PromptIds = NDArray[np.uint32]
"""A prompt from the moment it is read or encoded: every check and its digest take microseconds, not
milliseconds.
"""


class TemplateFields(Protocol):
    """Fields of a chat that its template sees beside the messages."""

    @property
    def reasoning_effort(self) -> Any: ...

    @property
    def chat_template_kwargs(self) -> Any: ...


def template_variables(body: TemplateFields) -> dict[str, Any]:
    """What the chat template sees beside the messages."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**effort, **(body.chat_template_kwargs or {})}


def namespace_of(salt: str, extra_key: str) -> Namespace:
    """Of a request's `cache_salt` and `extra_key`, each "" where it has none."""
    return Namespace(salt=f"{salt}\0{extra_key}" if extra_key else salt)
