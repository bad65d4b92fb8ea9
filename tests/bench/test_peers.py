"""The bench of a crowd: a small one goes through every stage, and leaves nothing in any table."""

from __future__ import annotations

import pytest

from kvflow.bench import peers
from kvflow.bench.zmtp import Frames, message, opening


def test_frames_are_found_however_the_bytes_arrive() -> None:
    sent = opening(b"me")[:64] + b"\4\6\5READY" + message(b"a", b"", b"b" * 300) + message(b"c")
    for step in (1, 7, 64, len(sent)):
        frames, found = Frames(), []
        for at in range(0, len(sent), step):
            found += frames.add(sent[at : at + step])
            assert frames.ready == (at + step >= 72)
        assert found == [b"a", b"", b"b" * 300, b"c"]


def test_what_is_too_much_is_a_miss() -> None:
    calm, busy = ({"stall_p99_ms": 1.0, "resting_cpu": share} for share in (0.01, 0.5))
    lines = peers._judged({"alone": calm, "at rest": busy}, 10, 11.0, 0.001)
    assert [line["ok"] for line in lines] == [True, True, False, True, False]
    assert [line["is"] for line in lines[2:4]] == [0.49, 0.01]
    (late,) = peers._judged({"alone": calm, "at rest": busy}, 5000, 9.0, 0.001)[3:4]
    assert late["is"] == 0.1 and not late["ok"], "a hundred per second is what prefill asks for"


@pytest.mark.slow
async def test_a_crowd_goes_through_every_stage() -> None:
    report = await peers.bench_peers(40, 200, 1.0, print)
    stages = report["stages"]
    assert stages["registering"]["sizes"]["decodes"] == 40 and not stages["registering"]["refused"]
    for name in ("alone", "at rest", "all lost"):
        assert 0 <= stages[name]["resting_cpu"] < stages[name]["cpu_share"], name
    assert stages["loss of a rack"]["sizes"]["connections"] == 36
    assert stages["registering again"]["sizes"]["displaced decodes"] <= 40
    at_rest = stages["goodbyes of decodes"]["sizes"]
    kept = {"displaced decodes", "parted decodes", "tasks", "connections"}
    assert not any(size for name, size in at_rest.items() if name not in kept), at_rest
    assert at_rest["parted decodes"] == 40
    assert report["cpu_us_per_heartbeat"] > 0
    assert len(report["must"]) == len(stages) + 3
