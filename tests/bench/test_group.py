"""`bench group` in small: every request succeeds on every rank, beside bare sockets."""

from __future__ import annotations

from kvflow.bench.group import CONCURRENCY, DECISIONS, bench_group, frame_sizes, growth_of

ROUNDS, REQUESTS = 1, 60


async def test_figures_of_two_sizes() -> None:
    report = await bench_group((1, 3), ROUNDS, REQUESTS, print)
    for ranks, figures in report["groups"].items():
        assert figures["left"] == {"requests": 0, "errors": 0}
        for concurrency in CONCURRENCY:
            row, bare = figures[str(concurrency)]["group"], figures[str(concurrency)]["bare"]
            assert row["decisions_per_s"] > row["requests_per_s"] > 0
            assert row["cpu_ms_per_room"] >= row["cpu_ms_per_room_rank_0"] > 0
            assert (row["cpu_ms_per_room_other_rank"] > 0) is (ranks == "3")
            assert bare["requests_per_s"] > 0
            assert set(figures[str(concurrency)]["ratios"]) == set(bare) < set(row)
    assert set(report["growth"]) == {str(concurrency) for concurrency in CONCURRENCY}


def test_each_decision_has_its_size() -> None:
    decisions, vote = frame_sizes()
    assert len(decisions) == DECISIONS
    assert decisions[0] > 1_024 > decisions[1] >= decisions[2] > vote > 8


def test_growth_is_that_of_one_rank() -> None:
    rows = {
        n: {
            kind: {"cpu_ms_per_room": base + 0.5 * n}
            for kind, base in (("group", 1.0), ("bare", 0.0))
        }
        for n in (2, 4)
    }
    assert growth_of(rows) == {
        kind: {"cpu_ms_per_room_and_rank": 0.5} for kind in ("group", "bare")
    }
    assert growth_of({2: rows[2]}) == {}
