"""Whole runs: seeds without a plant break nothing, and bugs of an engine are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvflow.node import PrefillNode
from kvflow.proof.sim.engine import Job, PlainScheduler
from kvflow.proof.sim.faults import KINDS, ON_COPIES, SWITCH
from kvflow.proof.sim.report import simulate_many
from kvflow.proof.sim.run import STEPS_MIN, simulate
from kvflow.protocols.pages.layout import PageIndices
from tests.soak import sized

SEEDS = 75
# Here a request is closed in the turn in which its copy to host memory ends.
RARE = 220


def test_seeds_without_a_plant_break_nothing() -> None:
    report = simulate_many((*range(SEEDS), RARE))
    assert not report["first_violations"]
    assert report["seeds"] == SEEDS + 1 and report["violations"] == 0
    assert (
        report["min_nodes"] >= 3 and report["min_rooms"] >= 8 and report["min_steps"] >= STEPS_MIN
    )
    assert report["seeds_with_fewer_than_2_fault_kinds"] == 0
    assert set(report["faults"]) == {*KINDS, *ON_COPIES, SWITCH} and all(report["faults"].values())
    assert (
        report["endings"]["waits for staging"] > SEEDS
        and report["endings"]["copies from staging"] > SEEDS
    )
    assert report["endings"]["ends told to every group"] > SEEDS / 20
    assert report["endings"]["rooms of engines without a loop"] > SEEDS
    assert not report["cells"]["error"]
    assert not [cell for cell in report["cells"]["missing"] if cell.startswith("residency")]


@pytest.mark.parametrize("seed", [22543, 28638])
def test_a_half_that_meets_the_refusal_of_an_earlier_request_of_its_number_breaks_nothing(
    seed: int,
) -> None:
    """Decode made no room of that request, so only the refusal tells."""
    assert simulate(seed).violation is None


def test_a_half_of_an_id_that_was_used_again_before_it_came_may_wait_for_its_counterpart() -> None:
    """The later room took from prefill the end that it kept for the half."""
    assert simulate(6990).violation is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_seeds_in_processes() -> None:
    seeds = range(1000, sized(1200, 2000))
    report = simulate_many(seeds, jobs=2)
    assert not report["first_violations"] and report["seeds"] == len(seeds)
    assert len(report["cells"]["missing"]) <= sized(28, 20), (
        "the rest are rare: lies, late answers, doubts and goodbyes"
    )


class _Forgetful(PlainScheduler):
    async def prefill(self, node: PrefillNode, job: Job) -> None:
        node.pages.take(1, object())
        await super().prefill(node, job)


def test_a_scheduler_that_leaks_pages_is_found() -> None:
    outcome = simulate(0, _Forgetful())
    assert outcome.violation is not None and outcome.violation.invariant in ("I1", "I5", "I7")


class _Hasty(PlainScheduler):
    async def prefill(self, node: PrefillNode, job: Job) -> None:
        steps: list[Callable[[], None]] = []
        original = job.model_step

        def put_off(
            node: PrefillNode, pages: PageIndices, which: Sequence[int]
        ) -> Callable[[], None]:
            steps.append(original(node, pages, which))
            return lambda: None

        job.model_step = put_off  # type: ignore[method-assign]
        await super().prefill(node, job)


def test_a_scheduler_that_sends_what_it_has_not_computed_is_found() -> None:
    violations = [simulate(seed, _Hasty()).violation for seed in range(3)]
    assert any(v is not None and v.invariant in ("I8", "I13") for v in violations)


def test_a_job_hands_over_what_its_prompt_says() -> None:
    assert Job(1, [1, 2]).handoff == Job(2, [1, 2]).handoff != Job(1, [1, 3]).handoff
