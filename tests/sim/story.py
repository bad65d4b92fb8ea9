"""The story of a seed, to compare runs by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvflow.proof.rules.outcome import Outcome


def story_of(simulate: Callable[..., Outcome], seed: int) -> str:
    lines: list[str] = []
    simulate(seed, tell=lambda at_s, who, what: lines.append(f"{at_s:.9f} {who} {what}"))
    assert len(lines) > 100
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
