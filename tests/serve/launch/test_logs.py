"""Log lines: one event is one line, in text and in JSON, whatever it is made of."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from kvflow.serve.launch.logs import LogFormat, printable, relayed, set_up_logging
from kvflow.telemetry.requests import CURRENT, RequestTrace

EVIL = "a\nb\r\n2026-01-01 00:00:00,000 E kvflow: forged\x1b[31m\u2028c\x85d\udcff"


@pytest.fixture(autouse=True)
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in ("kvflow", "kvflow.access")}
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def fail() -> None:
    raise ValueError(EVIL)


def log_all_kinds() -> None:
    log = logging.getLogger("kvflow.test")
    log.info("%s", EVIL)
    try:
        fail()
    except ValueError:
        log.exception("failed")
    log.warning("about rooms", extra={"rooms": tuple(range(20)), "request_id": "other"})
    warnings.warn("from python", stacklevel=1)
    logging.getLogger("third.party").info("noise")
    logging.getLogger("third.party").warning("matters")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_every_event_is_one_line_that_names_its_request(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    set_up_logging("debug", log_format=log_format, role="decode")
    trace = RequestTrace("mine")
    trace.rooms = (7,)
    token = CURRENT.set(trace)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            log_all_kinds()
    finally:
        CURRENT.reset(token)
    out = capsys.readouterr().err
    lines = out.splitlines()
    # Nothing else that some reader takes for the end of a line.
    assert out.count("\n") == len(lines)
    if log_format == "json":
        documents = [json.loads(line) for line in lines]
        assert len(documents) == 5
        assert [d["request_id"] for d in documents] == ["mine", "mine", "other", "mine", "mine"]
        assert (
            documents[0]["rooms"] == [7]
            and documents[0]["role"] == "decode"
            and documents[0]["level"] == "info"
        )
        assert "forged" in documents[0]["message"] and "ValueError" in documents[1]["traceback"]
        return
    starts = [line for line in lines if line[:1].isdigit()]
    assert len(starts) == 5 and all(line.startswith("    ") for line in lines if line not in starts)
    assert starts[0].endswith("(request mine, room 7)")
    assert starts[2].endswith("(request other, room 0, 1, 2, 3, 4, 5, 6, 7 and 12 more)")


def _nested(depth: int, text: str) -> None:
    if depth:
        _nested_beside(depth - 1, text)
    raise ValueError(text)


def _nested_beside(depth: int, text: str) -> None:
    """Two functions by turns: Python shortens a traceback only where one frame repeats."""
    try:
        _nested(depth, text)
    except ValueError as error:
        raise ValueError(text) from error


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    ("depth", "text"), [(400, "deep"), (0, "x" * 1_000_000), (40, "y" * 20_000)]
)
def test_no_error_decides_how_much_is_logged(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, depth: int, text: str
) -> None:
    set_up_logging("info", log_format=log_format, role="decode")
    log = logging.getLogger("kvflow.test")
    try:
        _nested(depth, text)
    except ValueError as error:
        log.exception("failed: %s", error)
    found = capsys.readouterr().err
    assert len(found) < 30_000
    assert "failed: " in found and "characters left out" in found
    assert found.rstrip('"}\n').endswith(text[-100:])


def test_the_last_words_of_a_process_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", log_format="json", role="prefill")
    try:
        fail()
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert json.loads(capsys.readouterr().err)["level"] == "critical"


def test_the_access_log_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted in (True, False, True):
        set_up_logging("info", access_log=wanted)
        logging.getLogger("kvflow.access").info("a request")
    assert capsys.readouterr().err.count("a request") == 2


def test_debug_is_not_for_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("debug")
    for name in ("aiohttp.access", "asyncio", "urllib3", "filelock"):
        logging.getLogger(name).debug("noise")
    assert capsys.readouterr().err == ""


def test_lines_of_a_child_are_relayed_as_json() -> None:
    assert json.loads(relayed('{"message": "hi", "role": "decode"}', "decode", "decode-1")) == {
        "message": "hi",
        "role": "decode",
        "process": "decode-1",
    }
    for text in ("WARNING: from C++", "[1]", "{broken", '"text"', EVIL):
        document = json.loads(relayed(text, "prefill", "prefill"))
        assert document["message"] in (text, printable(text)) and document["process"] == "prefill"


async def test_a_tls_client_that_left_is_no_fatal_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The texts are uvloop's. It reports them in a race that no test can force."""
    set_up_logging("debug")
    closed = "unable to perform operation on <TCPTransport closed=True>; the handler is closed"
    report = {"message": "Fatal error on SSL protocol", "exception": RuntimeError(closed)}
    asyncio.get_running_loop().call_exception_handler(report)
    assert capsys.readouterr().err == ""
    for other in ({"exception": RuntimeError("no memory")}, {"message": "something else"}):
        asyncio.get_running_loop().call_exception_handler(report | other)
        assert "RuntimeError" in capsys.readouterr().err
