"""Some seeds of the simulator, as judges of mutants. pytest does not collect this file."""

from __future__ import annotations

import pytest

from kvflow.proof.sim.run import simulate

SEEDS = 24


@pytest.mark.parametrize("first", range(0, SEEDS, 4))
def test_no_invariant_breaks(first: int) -> None:
    for seed in range(first, first + 4):
        outcome = simulate(seed)
        assert outcome.violation is None, (seed, outcome.violation)
