"""What an error looks like to a client: the type that its status has, and when to come back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvflow.http.errors import STATUS_OF_CODE, Failure
from kvflow.protocols.errors import Code

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    418: "api_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    500: "internal_error",
    502: "bad_gateway",
    503: "service_unavailable",
    504: "gateway_timeout",
}


@pytest.mark.parametrize("status", TYPES)
def test_a_status_has_its_type_and_says_when_to_come_back(status: int) -> None:
    answer = Failure(status, "some_code", "why", "field").response()
    assert (answer.status, answer.content_type) == (status, "application/json")
    assert isinstance(answer.body, bytes)
    error: Any = msgspec.json.decode(answer.body)["error"]
    assert error == {"type": TYPES[status], "code": "some_code", "param": "field", "message": "why"}
    assert answer.headers.get("Retry-After") == ("1" if status in (429, 503) else None)


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "invalid_request_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("status", ANTHROPIC_TYPES)
def test_clients_of_anthropic_read_the_same_error_in_their_form(status: int, path: str) -> None:
    failure = Failure(status, "some_code", "why", "field")
    answer = failure.response(path)
    assert answer.status == status
    assert isinstance(answer.body, bytes)
    found: Any = msgspec.json.decode(answer.body)
    kind = ANTHROPIC_TYPES[status]
    error = {"type": kind, "code": "some_code", "param": "field", "message": "why"}
    assert found == {"type": "error", "error": error, "request_id": ""}
    assert Failure.read(status, answer.body) == failure, "a router reads what a worker wrote"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("capacity", 503),
        ("429", 429),
        ("599", 599),
        ("399", 500),
        ("600", 500),
        ("unheard_of", 500),
        ("", 500),
    ],
)
def test_the_status_of_an_error_in_a_stream_is_that_of_its_code(code: str, status: int) -> None:
    body = msgspec.json.encode({"error": {"code": code, "message": "why"}})
    assert Failure.read(0, body) == Failure(status, code, "why")
    assert Failure.read(418, body).status == 418, "an answer has a status of its own"


def test_what_a_router_may_try_elsewhere_is_no_status_of_the_client() -> None:
    """4xx are the client's and final; 502 and 503 are about this pair; 504 is about time."""
    found: dict[int, set[Code]] = {}
    for code, status in STATUS_OF_CODE.items():
        found.setdefault(status, set()).add(code)
    assert found == {
        400: {Code.BAD_REQUEST, Code.PROMPT_MISMATCH},
        409: {Code.ROOM_IN_USE},
        499: {Code.CLIENT_GONE, Code.ABORTED},
        500: {Code.ENGINE_ERROR},
        502: {
            Code.REFUSED,
            Code.STALE_GRANT,
            Code.TRANSFER_ERROR,
            Code.PROTOCOL_ERROR,
            Code.PEER_LOST,
        },
        503: {Code.CAPACITY, Code.SHUTDOWN},
        504: {Code.DEADLINE, Code.RENDEZVOUS},
    }
    assert set(Code) == STATUS_OF_CODE.keys()
