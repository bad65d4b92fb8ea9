"""The suite itself: it finds planes that do not conform, and its command line tells them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.testing.conformance import CHECKS, Bench, NotConformingError, load_adapter
from kvflow.testing.conformance.__main__ import main

BY_NAME = {check.name: check for check in CHECKS}


@pytest.mark.parametrize(
    ("plane", "check", "found"),
    [
        ("Mute", "questions", "does not answer: What status means landed"),
        ("Early", "landed", "other bytes are there"),
        ("Elsewhere", "landed", "(other bytes are there|have changed)"),
        ("Early", "rooms", "foreign bytes"),
        ("Undrained", "cancelled", "bytes came after the write had ended"),
        ("Credulous", "fence of the dead", "a writer that lives and writes was fenced"),
        ("Credulous", "fence of the frozen", "a frozen writer was fenced"),
        ("Credulous", "fence elsewhere", "a writer of another host was fenced"),
        ("Leaking", "at rest", r"the return to \d+ descriptors and \d+ threads"),
        ("Trading", "at rest", r"the return to \d+ descriptors and \d+ threads"),
        ("Forgetful", "at rest", "left of 80 writes: {'writes': 93}"),
        ("Hanging", "closed while writing", "a write is under way after the plane was closed"),
        ("Reopening", "closed in every state", "took a write"),
    ],
)
async def test_a_plane_that_does_not_conform_is_found(
    plane: str, check: str, found: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check == "at rest":  # what it waits for never comes
        monkeypatch.setattr("kvflow.testing.conformance.bench.WITHIN_S", 1.0)
    with pytest.raises(NotConformingError, match=found):
        await BY_NAME[check].run(Bench(f"tests.transports.bad_planes:{plane}", seed, rooms=100))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("carrier pigeon", "no plane 'carrier pigeon'; there are local"),
        ("no_such_module:Adapter", "No module named 'no_such_module'"),
        ("tests.transports.bad_planes:Nobody", "has no attribute 'Nobody'"),
        ("tests.transports.bad_planes:_not_an_adapter", "makes a int, not a kvflow.testing"),
    ],
)
def test_a_plane_that_is_none_is_refused(text: str, why: str) -> None:
    with pytest.raises(MisuseError, match=why):
        load_adapter(text)


def told(*arguments: str) -> tuple[int, str]:
    """Exit status and stdout. On stderr asyncio may warn of a killed child."""
    ended = subprocess.run(
        [sys.executable, "-m", "kvflow.testing.conformance", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_the_command_says_what_was_shown_and_what_was_not() -> None:
    status, text = told(
        "--plane", "fake", "--only", "landed", "--only", "frozen receiver", "--seed", "3"
    )
    assert status == 0
    assert "ok       landed: 16733696 bytes in 12 writes" in text
    assert "not run  frozen receiver: its planes live within one process" in text


def test_the_command_reports_in_json_and_fails_where_a_check_does() -> None:
    status, text = told(
        "--plane", "tests.transports.bad_planes:Early", "--only", "landed", "--json"
    )
    report: dict[str, Any] = json.loads(text)
    found = report["planes"]["tests.transports.bad_planes:Early"]["landed"]
    assert status == 1 and found["status"] == "FAILED" and "other bytes" in found["detail"]


@pytest.mark.parametrize(
    ("plane", "detail"),
    [
        ("Broken", "ValueError: a bug of its own"),
        ("Dying", "LostError: the peer's process has ended where an answer of it was awaited"),
    ],
)
def test_a_check_that_ends_in_an_error_of_any_kind_has_failed_and_the_next_one_runs(
    plane: str, detail: str
) -> None:
    name = f"tests.transports.bad_planes:{plane}"
    status, text = told("--plane", name, "--only", "landed", "--only", "bad lists", "--json")
    report = json.loads(text)["planes"][name]
    assert status == 1
    assert {check: found["detail"] for check, found in report.items()} == {
        "landed": detail,
        "bad lists": detail,
    }


def test_the_command_refuses_what_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plane", "carrier pigeon", "--only", "landed"]) == 2
    assert "no plane 'carrier pigeon'; there are local" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["--plane", "fake", "--only", "flying"])
    capsys.readouterr()
    for rooms in ("0", "-7", "many"):
        with pytest.raises(SystemExit, match="2"):
            main(["--plane", "fake", "--only", "landed", "--rooms", rooms])
        assert (
            f"argument --rooms: {rooms!r} is not a number of rooms, 1 at least"
            in capsys.readouterr().err
        )
