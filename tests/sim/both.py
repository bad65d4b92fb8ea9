"""What is asked of the simulator of whole nodes and of that of bare endpoints alike."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim.plants import Plant

Simulate = Callable[..., Outcome]
Planted = Callable[[str], AbstractContextManager[object]]


def story_of(simulate: Simulate, seed: int) -> str:
    """A hash of every line of the story."""
    lines: list[str] = []
    simulate(seed, tell=lambda at_s, who, what: lines.append(f"{at_s:.9f} {who} {what}"))
    assert len(lines) > 100
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_that_a_seed_is_one_run(simulate: Simulate) -> None:
    assert story_of(simulate, 3) == story_of(simulate, 3) != story_of(simulate, 4)


def check_that_it_is_the_same_run_in_another_process(simulate: Simulate) -> None:
    module = simulate.__module__
    code = (
        f"from tests.sim.both import story_of; from {module} import simulate; "
        "print(story_of(simulate, 3))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment, cwd=root
    )
    assert done.stdout.strip() == story_of(simulate, 3), done.stderr


def check_that_the_seed_finds(
    name: str, found: tuple[int, str], simulate: Simulate, planted: Planted
) -> None:
    """`found`: the pinned seed, and the invariant it breaks."""
    seed, invariant = found
    with planted(name):
        violation = simulate(seed).violation
    assert violation is not None and violation.invariant == invariant, violation


def check_that_plants_are_gone_afterwards(plants: Sequence[Plant], simulate: Simulate) -> None:
    for plant in plants:
        with plant.install():
            pass
    assert simulate(0).violation is None


def check_what_a_hunt_says(hunt: Callable[..., dict[str, Any]], name: str, invariant: str) -> None:
    said: list[str] = []
    assert hunt(name, range(50), said.append)["invariant"] == invariant
    assert hunt(name, range(0), said.append) == {"plant": name}
    assert f"breaks {invariant}" in said[0] and "NOT FOUND" in said[1]
