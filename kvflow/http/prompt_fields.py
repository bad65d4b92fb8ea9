"""The fields of a request that determine a prompt's tokens and its namespace in the cache.

Workers and the router interpret them with the same code, so that the router finds the worker whose
cache contains the prompt.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.cache.hashes import Namespace

PromptIds = NDArray[np.uint32]
"""The token ids of a prompt, uint32 [n]. Checking a list instead would take milliseconds."""


class TemplateFields(Protocol):
    """The fields of a chat request that the chat template receives in addition to the messages."""

    @property
    def reasoning_effort(self) -> Any: ...

    @property
    def chat_template_kwargs(self) -> Any: ...


def template_variables(body: TemplateFields) -> dict[str, Any]:
    """Return the variables of the chat template, without the messages."""
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**effort, **(body.chat_template_kwargs or {})}


def namespace_of(salt: str, extra_key: str) -> Namespace:
    """Return the cache namespace of a request. A missing field is an empty string."""
    return Namespace(salt=f"{salt}\0{extra_key}" if extra_key else salt)
