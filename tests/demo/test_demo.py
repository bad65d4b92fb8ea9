"""The demo itself, as a user runs it, and the little it computes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from kvflow.serve.demo import run
from kvflow.serve.demo.client import Streamed, _writing_s
from kvflow.serve.demo.run import SHOWN_PLANES, Outcome, _prompts, _ticking, run_demo
from kvflow.serve.demo.show import ProgressOutput, TerminalOutput
from tests.planes import mooncake_unavailable_reason, nixl_unavailable_reason
from tests.soak import sized

KEYS = [
    "backend",
    "requests",
    "identical",
    "aborted",
    "bytes_at_abort",
    "bytes_total",
    "pages_home",
    "bytes_moved",
]
GOOD = Outcome(
    backend="local",
    requests=16,
    identical=16,
    aborted=1,
    bytes_at_abort=1,
    bytes_total=2,
    pages_home=True,
    bytes_moved=3,
)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvflow.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_json_has_exactly_the_promised_keys() -> None:
    assert list(msgspec.to_builtins(GOOD)) == KEYS


@pytest.mark.parametrize(
    "changes",
    [
        {"identical": 15},
        {"aborted": 0},
        {"bytes_at_abort": 0},
        {"bytes_at_abort": 2},
        {"pages_home": False},
    ],
)
def test_anything_that_did_not_hold_is_no_success(changes: dict[str, int]) -> None:
    assert GOOD.good
    assert not msgspec.structs.replace(GOOD, **changes).good


def test_prompts_are_distinct_however_many_are_asked_for() -> None:
    assert len(set(_prompts(64))) == 64


def test_no_number_of_the_table_is_cut_off_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    prompt = "Attribute access can be customized by defining methods"
    streamed = Streamed(prompt=prompt, output_ids=[0] * 512, ttft_s=12.345, total_s=123.456)
    TerminalOutput().table([streamed], [True], "mooncake")
    text = capsys.readouterr().out
    words = (
        "Attribute access can be",
        "tokens",
        "TTFT",
        "total",
        "stock",
        "512",
        "12345",
        "123456",
        "yes",
    )
    assert [word for word in words if word not in text] == []
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("…") == 1  # the prompt's


def test_writing_time_counts_overlapping_chunks_once() -> None:
    told = [
        ("matched", 0.0),
        ("chunk_queued", 1.0),
        ("chunk_queued", 2.0),
        ("write_ended", 3.0),
        ("write_ended", 5.0),
        ("chunk_queued", 7.0),
        ("write_ended", 8.0),
    ]
    assert _writing_s([{"what": what, "at_s": at} for what, at in told]) == 5.0


async def test_a_wait_says_how_long_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TICK_S", 0.001)
    lines: list[str] = []
    said = asyncio.Event()

    class Output(ProgressOutput):
        def line(self, text: str) -> None:
            lines.append(text)
            said.set()

    async with _ticking(Output(), "starting"):
        await said.wait()
    assert re.fullmatch(r"  starting: \d+ s \.\.\.", lines[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("fleets")
@pytest.mark.parametrize("backend", ["", pytest.param("nixl", marks=pytest.mark.soak)])
def test_the_demo_holds_what_it_promises(
    backend: str, forked_roles: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over `local` and mooncake, where none is named. Other settings do not matter."""
    shown = [*SHOWN_PLANES] if not mooncake_unavailable_reason() else ["local"]
    if backend == "nixl" and (reason := nixl_unavailable_reason()):
        pytest.skip(reason)
    with patch.dict(os.environ, KVFLOW_API_KEY="secret", KVFLOW_PAGE_SIZE="3"):
        status = run_demo(
            "", backend, as_json=True, requests=sized(4, 16), new_tokens=sized(16, 64)
        )
    out, err = capfd.readouterr()
    assert status == 0, err
    outcomes = [json.loads(line) for line in out.splitlines()]
    assert [one["backend"] for one in outcomes] == ([backend] if backend else shown)
    for outcome in outcomes:
        assert list(outcome) == KEYS
        assert Outcome(**outcome).good and outcome["requests"] == sized(4, 16)
        assert outcome["bytes_moved"] > 0


def test_an_unknown_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = demo("--model", str(tmp_path / "none"), "--transfer-backend", "local")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvflow demo: error: ")
    assert "does not exist" in done.stderr.splitlines()[-1]
