"""The demo itself, as a user runs it, and the little it computes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from kvflow.serve.demo.client import Streamed, _writing_s
from kvflow.serve.demo.run import TICK_S, Outcome, _prompts
from kvflow.serve.demo.show import TerminalOutput
from tests.planes import nixl_unavailable_reason
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("printed")
@pytest.mark.parametrize(
    "backend", ["nixl", *(pytest.param(p, marks=pytest.mark.soak) for p in ("local", "mooncake"))]
)
def test_the_demo_holds_what_it_promises(backend: str) -> None:
    if backend == "mooncake" and importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake is not installed")
    if backend == "nixl" and (reason := nixl_unavailable_reason()):
        pytest.skip(reason)
    size = sized(("--requests", "4", "--new-tokens", "16"), ())
    done = demo("--json", "--transfer-backend", backend, *size)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert list(outcome) == KEYS
    assert Outcome(**outcome).good and outcome["requests"] == sized(4, 16)
    assert outcome["bytes_moved"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("printed")
def test_what_a_pipe_sees_of_it() -> None:
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "KVFLOW_API_KEY": "secret",
        "KVFLOW_PAGE_SIZE": "3",
    }
    command = [sys.executable, "-m", "kvflow", "demo", "--transfer-backend", "local"]
    command += ["--requests", "4"]
    lines, at_s = [], [time.monotonic()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            at_s.append(time.monotonic())
    assert process.returncode == 0
    # A busy machine is slow, not silent.
    assert max(b - a for a, b in itertools.pairwise(at_s)) < 10 * TICK_S
    text = "\n".join(lines)
    assert re.search(r"tokens/s: [\d,]+ alone, [\d,]+ with 2 at once", text)
    first = next(n for n, line in enumerate(lines) if line.startswith("comparing"))
    assert max(map(len, lines[first:])) <= 80
    good, aborted = text.split("from both sides:")[1:]
    # Whichever leg sees first that its client is gone tells the other.
    ends = "◀─── drained" if "◀─── drained" in aborted else "◀──── failed"
    for drawn, parts in (
        (good, ("◀═══ 32 pages ═══", "-> success")),
        (aborted, ("╳═══ 32 pages ═══", ends)),
    ):
        times = [float(at) for at in re.findall(r"^ +(\d+\.\d) ", drawn, re.MULTILINE)]
        assert len(times) > 5 and times == sorted(times)
        assert all(part in drawn for part in parts), drawn


def test_an_unknown_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = demo("--model", str(tmp_path / "none"), "--transfer-backend", "local")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvflow demo: error: ")
    assert "does not exist" in done.stderr.splitlines()[-1]
