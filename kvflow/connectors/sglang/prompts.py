"""The prompt on which a room's halves must agree.

SGLang does not show the prompt to its senders and receivers. So while SGLang makes one of them, the
request's prompt is kept in a `PromptSlot`, from which the new sender or receiver takes it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np

from kvflow.protocols.arguments import CheckedPrompt, check_prompt
from kvflow.protocols.errors import KvflowError, MisuseError


def prompt_of(request: Any) -> CheckedPrompt:
    """Return the length and the digest of the token ids that prefill computes for a request.

    After a retraction with new weights, prefill also computes the tokens that decode has generated.
    The ids of a multimodal prompt depend on what each server has computed of the media. For these
    only the length is compared. Raises: MisuseError for an empty prompt.
    """
    ids = np.asarray(request.origin_input_ids, dtype=np.int64)
    if getattr(request, "pd_rebootstrap_in_progress", False):
        ids = np.concatenate((ids, np.asarray(request.output_ids, dtype=np.int64)))
    if getattr(request, "multimodal_inputs", None) is not None and ids.size:
        return CheckedPrompt(ids.size, sha256(b"multimodal").digest())
    return check_prompt(ids)


class PromptSlot:
    """The prompt of the request for which SGLang makes a sender or a receiver.

    Only the scheduler's thread uses it.
    """

    def __init__(self) -> None:
        self._prompt: CheckedPrompt | KvflowError | None = None

    @contextmanager
    def holding(self, request: Any) -> Generator[None]:
        """Keep the prompt of `request` inside the `with` statement."""
        try:
            self._prompt = prompt_of(request)
        except KvflowError as error:
            # An error that is raised here would end SGLang's scheduler.
            self._prompt = error
        try:
            yield
        finally:
            self._prompt = None

    def take(self) -> CheckedPrompt:
        """Return the prompt. Raises: MisuseError for a prompt that is not valid, or if there is
        none.
        """
        if isinstance(self._prompt, KvflowError):
            raise self._prompt
        if self._prompt is None:
            raise MisuseError("no prompt: SGLang made a sender or a receiver for no known request")
        return self._prompt
