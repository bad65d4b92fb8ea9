"""Conversions between a chat and the bodies and answers of other interfaces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvflow.http.errors import RequestError
from kvflow.serve.http.schemas import Rendezvous


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
        return msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
