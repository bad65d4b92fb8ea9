"""Conversions between a chat and the bodies and answers of other interfaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvflow.http.errors import RequestError
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.serve.http.completion import Delta
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.serve.http.schemas import ChatRequest, Rendezvous
from kvflow.serve.http.tools.conversation import decoded_arguments
from kvflow.serve.http.tools.turns import Turns, chat_requests

if TYPE_CHECKING:
    from kvflow.serve.http.pipeline import CompletionPipeline


class ConvertedCall:
    """The part that calls have in common whose body is converted to a chat with one choice."""

    def __init__(
        self,
        convert: Callable[[], ChatRequest],
        names: Mapping[str, str],
        answer_id: str,
        *,
        stream: bool,
    ) -> None:
        """`convert` returns the chat, or raises RequestError. For `names` see `renamed`."""
        self.stream = stream
        self._convert, self._names, self._id = convert, names, answer_id
        self._requests: list[GenerationRequest] = []
        self._turns: Turns | None = None

    @property
    def turns(self) -> Turns:
        assert self._turns is not None
        return self._turns

    @property
    def prompt_tokens(self) -> int:
        return len(self._requests[0].prompt)

    def id_of(self, index: int) -> str:
        return self._id

    async def generation_requests(self, pipeline: CompletionPipeline) -> list[GenerationRequest]:
        with renamed(self._names):
            self._requests, reading = await chat_requests(self._convert(), pipeline)
        self._turns = Turns(reading, 1, stream=self.stream)
        return self._requests

    async def scored(self, index: int, scores: PromptLogprobs) -> None:
        """Do nothing: these answers report no log-probabilities of the prompt."""

    def add(self, index: int, delta: Delta) -> None:
        self.turns.add(index, delta)


def rendezvous_of(body: Rendezvous) -> dict[str, Any]:
    """Return the fields by which both legs meet, for the chat of the same request."""
    return {name: getattr(body, name) for name in Rendezvous.__struct_fields__}


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Give the fields of a chat in errors the names that they have in the body.

    `names` are whole names, or ends of names.
    """
    try:
        yield
    except RequestError as error:
        for name, other in names.items():
            if error.param is not None and error.param.endswith(name):
                param = error.param.removesuffix(name) + other
                text = str(error)
                if text.startswith(error.param):
                    text = param + text.removeprefix(error.param)
                raise RequestError(text, param=param, reason=error.reason) from None
        raise


def as_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a call's arguments, empty if the answer was cut off within it."""
    try:
        return decoded_arguments("", text)
    except RequestError:
        return {}
