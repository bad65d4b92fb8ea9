"""A plan beside a real fleet: all requests are answered, and the cache does what was predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvflow.plan.profile import load_profile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def test_a_plan_is_measured_and_checked(tmp_path: Path) -> None:
    # Prompts of one session follow each other so late that the cache has what came before.
    lines = [
        {
            "timestamp": 700 * n,
            "input_length": 512 * (n % 3 + 1) + 100,
            "output_length": 20,
            "hash_ids": [*range(n % 3 + 1), 100 + n],
        }
        for n in range(12)
    ]
    trace, profile = tmp_path / "trace", tmp_path / "profile"
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = "--trace", str(trace), "--ttft", "9", "--itl", "999", "--json", "--shrink", "8"
    flags = "--", "--max-model-len", "1024", "--num-pages", "600"
    report = planned(*words, "--measure", "--save", str(profile), "--check", "1,1", *flags)
    rows = {row["figure"]: row for row in report["check"]["rows"]}
    assert rows["hit rate"]["predicted"] == pytest.approx(rows["hit rate"]["real"], abs=1e-9)
    assert rows["hit rate"]["real"] > 0.5
    assert all(row["predicted"] > 0 and row["real"] > 0 for row in rows.values())
    assert report["check"]["cpu_s"] > 0
    found = load_profile(profile)
    assert (found.sizes.prefill_pool, found.sizes.max_model_len) == (9600, 1024)
    assert found.transfer_bytes_s > 1e6 and found.beside_decode >= 1
    # The saved profile gives the same plan.
    again = planned(*words, "--profile", str(profile))
    assert {**again, "check": report["check"]} == report


def planned(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "kvflow", "plan", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
