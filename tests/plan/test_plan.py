"""`kvflow plan`: the workers it finds, what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow.plan.commands import app
from kvflow.plan.profile import StepTimes
from kvflow.plan.search import Limits, search
from kvflow.plan.trace import read_trace
from kvflow.protocols.errors import MisuseError
from tests.plan import profiles as known

LINE = {"timestamp": 0, "input_length": 600, "output_length": 64, "hash_ids": [0, 1]}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Return the paths of a trace of 40 requests in 2 s, and of a profile."""
    lines = [
        json.dumps(LINE | {"timestamp": 50 * n, "hash_ids": [n % 30, 100 + n]}) for n in range(40)
    ]
    (tmp_path / "trace").write_text("\n".join(lines))
    known.profile().save(tmp_path / "profile")
    return str(tmp_path / "trace"), str(tmp_path / "profile")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_plan_is_the_smallest_fleet_that_keeps_the_limits(files: tuple[str, str]) -> None:
    trace = read_trace(Path(files[0]))
    times, limits = StepTimes(known.profile()), Limits(0.2, 12e-3, 0.95)
    found = search(trace, times, known.SIZES, limits, 16)
    assert found.best.keeps and found.best.prefills > 1
    # None that was tried before keeps them.
    shapes = {(one.prefills, one.decodes): one.keeps for one in found.tried}
    assert list(shapes.values()) == [*[False] * (len(shapes) - 1), True]
    # The longest request has 664 tokens. In the largest pool, 10 of 40 prompts find a block.
    assert found.pools[0].tokens == 672
    assert found.pools[-1].found.figures.hit_rate == pytest.approx(10 * 512 / (40 * 600))
    rates = [one.found.figures.hit_rate for one in found.pools]
    assert rates[0] < rates[-1]


def test_json_and_tables_say_the_same(files: tuple[str, str]) -> None:
    trace, profile = files
    words = "--trace", trace, "--profile", profile, "--ttft", "0.2", "--itl", "12"
    done = run(*words, "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["keeps_limits"] is True
    assert report["requests"] == 40 and report["refused_as_too_long"] == 0
    text = run(*words).stdout
    needed = f"{report['prefills']} prefills and {report['decodes']} decodes are enough for"
    assert needed in " ".join(text.split())
    for one in report["tried"]:
        assert f"{one['tokens_s']:.1f}" in text


def test_limits_that_no_fleet_keeps_are_status_1(files: tuple[str, str]) -> None:
    trace, profile = files
    words = "--trace", trace, "--profile", profile, "--ttft", "0.01", "--itl", "12", "--most", "2"
    done = run(*words)
    text = " ".join(done.stdout.split())
    assert done.exit_code == 1 and "are not enough, and more were not tried, for TTFT" in text


def test_the_search_ends_where_more_workers_do_not_help(files: tuple[str, str]) -> None:
    """A prompt alone takes longer than that limit."""
    trace, profile = files
    words = "--trace", trace, "--profile", profile, "--ttft", "0.01", "--itl", "12"
    done = run(*words)
    text = " ".join(done.stdout.split())
    assert done.exit_code == 1 and "are not enough, and more do not help, for TTFT" in text
    report = json.loads(run(*words, "--json").stdout)
    assert report["more_workers_help"] is False
    assert len(report["tried"]) < 16 and report["tried"][-1]["prefills"] == report["prefills"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give either --measure or --profile FILE"),
        (("--measure", "--profile", "profile"), "give either --measure or --profile FILE"),
        (("--profile", "profile", "--save", "x"), "--save without --measure"),
        (("--profile", "profile", "--check", "0,1"), "--check '0,1': two numbers in 1..64"),
        (("--profile", "profile", "--check", "x"), "--check 'x': two numbers in 1..64"),
        (("--profile", "profile", "--block", "256"), "line 1: 2 hash_ids for 600 tokens"),
        (("--measure", "--", "--no-such", "1"), "--no-such: after --, plan takes flags of"),
        (("--measure", "--", "--page-size"), "--page-size: after --, plan takes flags of"),
        (("--measure", "--", "--api-key", "k"), "--api-key or KVFLOW_API_KEY: plan asks its fleet"),
        (("--measure", "--", "--tls-cert=c", "--tls-key=k"), "plan asks its fleet without a key"),
        (("--measure", "--", "--page-size=0"), "--page-size: '0': expected int >= 1"),
    ],
)
def test_what_it_refuses(
    files: tuple[str, str],
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("--trace", files[0], "--ttft", "1", "--itl", "50", *words)
    assert isinstance(done.exception, MisuseError) and said in str(done.exception)


def test_requests_that_no_worker_serves_are_counted(files: tuple[str, str], tmp_path: Path) -> None:
    trace, profile = Path(files[0]), files[1]
    long = LINE | {"input_length": 3000, "hash_ids": list(range(6))}
    trace.write_text(trace.read_text() + "\n" + json.dumps(long))
    words = "--profile", profile, "--ttft", "9", "--itl", "99", "--json"
    report = json.loads(run("--trace", str(trace), *words).stdout)
    assert (report["requests"], report["refused_as_too_long"]) == (40, 1)
    trace.write_text(json.dumps(long))
    done = run("--trace", str(trace), *words)
    assert "every request of the trace is longer than the 2048 tokens" in str(done.exception)
