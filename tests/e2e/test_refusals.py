"""Every leg of a request that cannot be served is told why by the side that knows, long before a
timer ends it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.refusals import CASES, HOLD_S, Case, Row, make_other_model, rows_of

RETRIED = {408, 429, 500, 502, 503, 504}  # by sglang_router
SLACK_S = 5.0  # of a busy machine; what is not told shows after `HOLD_S`


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("fleets")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_every_leg_is_told(case: Case, other_model: Path) -> None:
    if case.name == "data plane":
        pytest.importorskip("mooncake.engine")
    rows = await rows_of(case, other_model)
    assert [row.leg for row in rows] == ["prefill", "decode", "client"]
    for row in rows:
        within_s = case.limit_s * max(1, row.attempts) + SLACK_S
        assert row.seconds < within_s, row
        assert within_s < HOLD_S or "rendezvous_s" in case.prefill, (
            "prefill's own timer must not be what ends it"
        )
        assert row.status in (RETRIED if may_pass(case) else {400}) or is_dead(case, row), row
        assert case.reason in row.text or is_dead(case, row) or row.leg == "client", row


def may_pass(case: Case) -> bool:
    """Another attempt, or another pair, may serve it; a prompt that a pool can never hold is its
    client's to change.
    """
    return "too small" not in case.name


def is_dead(case: Case, row: Row) -> bool:
    """The leg of a process that was killed: its connection ends."""
    return case.fault in ("gone", "killed") and row.leg == case.victim and row.status == 0
