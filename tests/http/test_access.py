"""Request ids and the access log: a client's id is cleaned, echoed, forwarded and logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvflow.protocols.errors import Cause, Code
from kvflow.serve.launch.logs import RequestFields
from kvflow.telemetry.requests import MAX_REQUEST_ID, clean_request_id
from tests.fakes.servers import Front
from tests.fakes.service import BODY, Role, body


class Lines(logging.Handler):
    """Every record under `kvflow`, with the fields a role's handler gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []
        self.written = asyncio.Event()
        self.addFilter(RequestFields())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.written.set()

    def access(self, path: str) -> list[dict[str, Any]]:
        found = [r for r in self.records if r.name == "kvflow.access" and r.fields["path"] == path]
        return [
            {**r.fields, "request_id": r.request_id, "rooms": r.rooms, "level": r.levelname}
            for r in found
        ]

    async def last(self, path: str, count: int) -> dict[str, Any]:
        """The line that makes it `count`: a stream's is written when its handler has ended."""
        async with asyncio.timeout(20):
            while len(self.access(path)) < count:
                self.written.clear()
                await self.written.wait()
        return self.access(path)[-1]


@pytest.fixture
async def lines() -> AsyncIterator[Lines]:
    handler, logger = Lines(), logging.getLogger("kvflow")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


async def test_an_id_is_forwarded_to_both_legs_and_names_the_lines_of_all_three(
    front: Front, lines: Lines
) -> None:
    answer = await front.call("POST", "/generate", BODY, headers={"X-Request-ID": "mine-1"})
    assert (answer.status, answer.headers["X-Request-ID"]) == (200, "mine-1")
    assert answer.json["meta_info"]["id"] == "mine-1"
    told = {
        "request_id": "mine-1",
        "rooms": (int(answer.headers["X-Kvflow-Room"]),),
        "status": 200,
        "client": "127.0.0.1",
    }
    found = lines.access("/generate")
    assert [line | told for line in found] == found and len(found) == 3
    texts = [record.getMessage() for record in lines.records if record.name == "kvflow.access"]
    sizes = [text.rpartition(" s, ")[2] for text in texts if " s, " in text]
    assert all('"POST /generate" 200 ' in text for text in texts if " s, " in text)
    assert sorted(sizes) == ["1+1 tokens", "1+3 tokens"], "prefill's and decode's"


async def test_without_an_id_the_router_makes_one_that_all_three_use(
    front: Front, lines: Lines
) -> None:
    made = set()
    for stream in (False, False, True):  # of a stream it leaves before the handler has ended
        answer = await front.call("POST", "/generate", {**BODY, "stream": stream})
        made.add(answer.headers["X-Request-ID"])
    assert len(made) == 3
    ids = [line["request_id"] for line in lines.access("/generate")]
    assert set(ids) == made and len(ids) == 9


async def test_what_the_router_asks_one_worker_for_has_its_id_there_too(
    front: Front, lines: Lines
) -> None:
    answer = await front.call("GET", "/v1/models", headers={"X-Request-ID": "mine-2"})
    assert (answer.status, answer.headers["X-Request-ID"]) == (200, "mine-2")
    assert [line["request_id"] for line in lines.access("/v1/models")] == ["mine-2"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_error_answers_carry_the_id_and_the_line_says_why(
    front: Front, decode: Role, lines: Lines, stream: bool
) -> None:
    decode.service.failure = Cause(Code.CAPACITY, "decode is full")
    headers = {"X-Request-ID": "doomed"}
    answer = await front.call("POST", "/generate", {**BODY, "stream": stream}, headers=headers)
    assert (answer.status, answer.headers["X-Request-ID"]) == (503, "doomed")
    every = lines.access("/generate")
    refused = [line for line in every if "decode is full" in line.get("error", "")]
    assert refused and {line["request_id"] for line in refused} == {"doomed"}


async def test_a_stream_that_fails_after_its_status_says_so_in_its_line(
    decode: Role, met: None, lines: Lines
) -> None:
    decode.service.fail_after = 1
    [_, last] = await decode.events("/generate", body())
    assert last["error"]["message"].endswith("step failed")
    line = await lines.last("/generate", 1)
    assert (line["status"], line["error"]) == (200, "engine_error: step failed")


@pytest.mark.parametrize("path", ["/nowhere", "/generate"])
async def test_what_no_handler_answers_is_logged_too(decode: Role, lines: Lines, path: str) -> None:
    answer = await decode.call("GET", path, headers={"X-Request-ID": "lost"})
    assert answer.status in (404, 405) and answer.headers["X-Request-ID"] == "lost"
    assert answer.headers.get("Allow") == (None if answer.status == 404 else "POST")
    assert path in answer.json["error"]["message"]
    assert [line["status"] for line in lines.access(path)] == [answer.status]


async def test_a_client_that_leaves_is_logged_with_499(decode: Role, lines: Lines) -> None:
    headers = {"X-Request-ID": "left"}
    asking = asyncio.create_task(decode.call("POST", "/generate", body(), headers=headers))
    await decode.begun()
    asking.cancel()
    await decode.over(7)
    line = await lines.last("/generate", 1)
    assert (line["status"], line["request_id"], line["rooms"]) == (499, "left", (7,))
    assert line["error"] == "the client disconnected"


async def test_polled_routes_are_for_debugging(decode: Role, lines: Lines) -> None:
    for path, level in (("/health", "DEBUG"), ("/v1/models", "INFO")):
        await decode.get(path)
        assert [line["level"] for line in lines.access(path)] == [level]


async def test_a_worker_that_joins_again_and_again_is_for_debugging(
    front: Front, lines: Lines
) -> None:
    await front.get("/workers")
    await front.refused(403, "/workers", {"url": "http://127.0.0.1:1"})
    levels = [line["level"] for line in lines.access("/workers")]
    assert levels == ["DEBUG", "INFO"], "what is refused is no poll"


HOSTILE = [
    "a\tb c",
    'quote" and \\',
    "ümläut-\xff",
    "x" * 8000,
    "(request forged, room 1)",
    "\x7f\x80\x1b[31m",
    " ",
    "%0a%0d",
]


@pytest.mark.parametrize("given", HOSTILE)
async def test_a_hostile_id_is_cleaned_and_bounded(front: Front, given: str, lines: Lines) -> None:
    """Sent as raw bytes: no client library would."""
    raw = json.dumps(BODY).encode()
    head = (
        "POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
        f"{len(raw)}\r\nX-Request-ID: {given}\r\n\r\n"
    )
    answer = await front.exchanged(head.encode("latin-1"), raw)
    status = int(answer.split()[1])
    if status == 400:  # aiohttp's own parser: control characters, a field of more than 8190 bytes
        assert not lines.access("/generate")
        return
    assert status == 200
    echoed = re.search(rb"\r\nX-Request-ID: ([^\r\n]*)\r\n", answer)
    assert echoed is not None and re.fullmatch(rb"[A-Za-z0-9._:/+=@~_-]{1,128}", echoed[1])
    assert {line["request_id"] for line in lines.access("/generate")} == {echoed[1].decode()}


@pytest.mark.parametrize(
    "given", [*HOSTILE, "line\nbreak", "\r\n", "", "\udcff\u2028", "好" * 5000]
)
def test_whatever_is_given_becomes_one_short_safe_word(given: str) -> None:
    cleaned = clean_request_id(given)
    assert re.fullmatch(r"[A-Za-z0-9._:/+=@~_-]+", cleaned) and len(cleaned) <= MAX_REQUEST_ID


def test_what_is_safe_is_kept() -> None:
    for given in (
        "9f1c2d3e-0000-4000-8000-1234567890ab",
        "cmpl-A_b.c:d/e+f=g@h~i",
        "00-4bf92f3577b34da6a3ce929d0e0e4736",
    ):
        assert clean_request_id(given) == given
