"""Fields of a body that decide which tokens a prompt has, and with which prompts it shares cached
pages.

A worker and the router in front of it read them alike, so that the router finds the worker whose
cache has the prompt.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.cache.hashes import Namespace

PromptIds = NDArray[np.uint32]
"""A prompt's token ids, from the moment it is read or encoded. With an array, each check and the
digest take microseconds, not milliseconds.
"""


class TemplateFields(Protocol):
    """Fields of a chat that its template reads beside the messages."""

    @property
    def reasoning_effort(self) -> Any: ...

    @property
    def chat_template_kwargs(self) -> Any: ...


def template_variables(body: TemplateFields) -> dict[str, Any]:
    """Return the variables of the chat template, beside the messages."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**effort, **(body.chat_template_kwargs or {})}


def namespace_of(salt: str, extra_key: str) -> Namespace:
    """Return the namespace for a request's `cache_salt` and `extra_key`, each "" where it has
    none.
    """
    return Namespace(salt=f"{salt}\0{extra_key}" if extra_key else salt)
