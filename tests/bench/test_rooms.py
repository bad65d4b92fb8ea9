"""Rooms one at a time, beside the messages and the write that they consist of."""

from __future__ import annotations

import pytest

from kvflow.bench import rooms
from kvflow.bench.pair import WorkerPair


async def test_rooms_are_measured_beside_bare_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "BARE_ROOMS", 30)
    async with await WorkerPair.open("local", order="page_first", **rooms.SHAPE) as pair:
        await pair.bare_setup()
        found = await rooms.beside_bare(pair)
        assert found["ratio"] == pytest.approx(found["room_p50_ms"] / found["bare_p50_ms"])
        assert found["apart_ratio"] == pytest.approx(found["room_p50_ms"] / found["apart_p50_ms"])
        assert found["ratio"] > 0 < found["apart_ratio"]
        # The exchanges are repeatable, and leave the rooms' pages alone.
        assert len(await pair.bare_rooms(5)) == len(await pair.bare_rooms(5, apart=True)) == 5
        for state in await pair.both("state"):
            assert (state["rooms"], state["free_pages"]) == (0, state["num_pages"])
