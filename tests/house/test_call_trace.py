"""A message's path through the package is no longer than it was, and the trace counts what it
should.
"""

from __future__ import annotations

import pytest

from tests.house.call_trace import DOUBLES, TRACES, CallTrace, trace_all

STOPS_MAX = {"Bootstrap": 74, "ChunkDone": 61, "Abort": 112}  # lower them when a path gets shorter
FILES_MAX = {"Bootstrap": 18, "ChunkDone": 17, "Abort": 18}
FRAMES = {"Bootstrap": 1, "ChunkDone": 1, "Abort": 2}  # its ack comes back
LINK = "transports/control/memory.py"


@pytest.fixture
async def traces() -> dict[str, CallTrace]:
    return await trace_all()


async def test_no_path_has_grown(traces: dict[str, CallTrace]) -> None:
    assert set(traces) == set(TRACES)
    for name, trace in traces.items():
        assert len(trace.stops) <= STOPS_MAX[name], trace.stops
        assert len(trace.files) <= FILES_MAX[name], trace.files


async def test_a_frame_is_two_stops_on_the_link(traces: dict[str, CallTrace]) -> None:
    for name, trace in traces.items():
        assert sum(stop.file == LINK for stop in trace.stops) == 2 * FRAMES[name]


async def test_both_sides_are_on_the_path(traces: dict[str, CallTrace]) -> None:
    """Before its frame is delivered, and after,
    a message passes code that is not part of a double.
    """
    for trace in traces.values():
        delivered = next(
            i
            for i, stop in enumerate(trace.stops)
            if stop.file == LINK and "deliver" in stop.function
        )
        for half in (trace.stops[:delivered], trace.stops[delivered + 1 :]):
            assert any(stop.file not in DOUBLES for stop in half)


async def test_it_counts_the_same_each_time(traces: dict[str, CallTrace]) -> None:
    again = await trace_all()
    assert {name: trace.stops for name, trace in again.items()} == {
        name: t.stops for name, t in traces.items()
    }
