"""Every example that needs no server runs as a user runs it (`chat.py` runs against one in tests/e2e)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDS_A_SERVER = {"chat.py"}
EXAMPLES = sorted(path for path in ROOT.glob("examples/*.py") if path.name not in NEEDS_A_SERVER)


def test_there_are_examples() -> None:
    assert {"one_room.py", "sync_engine.py", "bare_endpoints.py", "embed_in_your_engine.py"} <= {
        path.name for path in EXAMPLES
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and not done.stderr.strip(), done.stderr


@pytest.mark.parametrize("name", ["sync_engine.py", "bare_endpoints.py"])
def test_an_engine_without_an_event_loop_has_none(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert not re.search(r"\b(asyncio|async|await)\b", text)
