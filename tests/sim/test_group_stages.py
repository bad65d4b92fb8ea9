"""One request of a group of four stages, which one of them cannot serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvflow.proof.sim.times import HEAR_S
from kvflow.proof.sim.variety import TIMING
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.group import MemberPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.wire.messages import RoomId
from tests.sim.stages import Stages


@pytest.fixture
def group() -> Iterator[Stages]:
    with Stages() as stages:
        yield stages


def failures(group: Stages) -> dict[str, int]:
    return {
        what: count
        for what, count in group.world.agreement.counts.items()
        if what.startswith("failed")
    }


@pytest.mark.parametrize("waiting", [1, 2, 3])
def test_aborted_where_it_waits_for_bootstrap_after_an_earlier_stage_has_dropped_it(
    group: Stages, waiting: int
) -> None:
    """Nothing of decode reaches that stage, neither its half of the room nor the end of it."""
    late = group.stages[waiting]
    group.world.wire.cut.add(late.control)
    client, theirs = group.ask(), group.offer()
    group.clock.play(0.2)
    rooms = [stage.endpoint.rooms[RoomId(theirs.room)] for stage in group.stages]
    assert [room.phase for room in rooms] == [
        PrefillPhase.EXPECTED if stage is late else PrefillPhase.ANNOUNCED for stage in group.stages
    ]
    group.decode.end(theirs, "the client has gone")
    earlier = group.stages[waiting - 1]
    while earlier.by_key:
        group.clock.play(0.001)
    dropped_at_s = group.clock.now
    group.clock.play(HEAR_S)
    assert client.told
    assert failures(group) == {f"failed {Code.CLIENT_GONE}": 1}
    for stage in group.stages:
        assert not stage.endpoint.rooms
        assert not stage.member.tickets
        assert stage.counts.rooms_opened == sum(stage.counts.endings.values()) == 1
    assert group.clock.now - dropped_at_s <= HEAR_S + 0.001
    group.world.wire.cut.clear()
    group.clock.play(10.0)
    group.at_rest()


def test_no_success_without_the_others(group: Stages) -> None:
    """The pages of one stage move later than those of all others."""
    slow = group.stages[2]
    slow.stall(1.0)
    client, theirs = group.ask(), group.offer()
    group.clock.play(0.9)
    for stage in group.stages:
        (record,) = stage.member.tickets.values()
        assert record.phase is (MemberPhase.STARTED if stage is slow else MemberPhase.DONE)
    assert (client.told, theirs.succeeded) == (False, False)
    group.clock.play(1.0)
    assert (client.succeeded, theirs.succeeded) == (True, True)
    assert not failures(group)
    group.clock.play(2.0)
    group.at_rest()


def test_a_stage_dies_that_has_not_landed(group: Stages) -> None:
    slow = group.stages[2]
    slow.stall(1.0)
    client = group.ask()
    group.offer()
    group.clock.play(0.9)
    group.world.kill(slow)
    group.start_again(2)
    group.clock.play(10.0)
    assert client.told
    assert not client.succeeded
    assert failures(group) == {f"failed {Code.PEER_LOST}": 1}
    group.at_rest()
    group.assert_served(8)


@pytest.mark.parametrize("first", ["client", "decode", "decode after the drain"])
def test_a_room_id_used_again_while_one_stage_drains_the_earlier_request(
    group: Stages, first: str
) -> None:
    """That stage cannot open it, so the second request fails everywhere with one cause."""
    group.faults.next_write = "stuck"
    client, theirs = group.ask(), group.offer()
    group.clock.play(0.05)
    group.decode.end(theirs, "the client has gone")
    group.clock.play(0.1)
    assert client.told
    (drains,) = [stage for stage in group.stages if stage.endpoint.rooms]
    other = group.world.start_decode(1)
    group.clock.play(0.05)  # it is registered
    if first == "decode":
        second = group.offer(decode=other)
        group.clock.play(0.02)
        again = group.ask()
    else:
        again = group.ask()
        group.clock.play(0.02)
        assert again.told
        while first == "decode after the drain" and drains.endpoint.rooms:
            group.clock.play(0.01)
        second = group.offer(decode=other)
    group.clock.play(HEAR_S)
    assert again.told
    assert second.at.told
    cause = Cause(
        Code.ROOM_IN_USE, "room 7 is in use: writes of the last room of that id still run"
    )
    assert second.at.record.state.cause == cause
    assert failures(group) == {f"failed {Code.CLIENT_GONE}": 1, f"failed {Code.ROOM_IN_USE}": 1}
    assert all(stage.endpoint.rooms == {} for stage in group.stages if stage is not drains)
    group.clock.play(3.0)
    group.at_rest()
    assert not any(len(stage.endpoint.core.rendezvous) for stage in group.stages)
    group.assert_served(decode=other)


@pytest.mark.parametrize("reachable", [0, 1, 3])
@pytest.mark.parametrize("first", ["client", "decode"])
def test_a_request_that_is_refused_while_a_stage_is_missing(
    group: Stages, reachable: int, first: str
) -> None:
    lost = group.stages[2]
    group.world.lines.cut.add(lost.incarnation)
    group.clock.play(2 * TIMING.lost_after_s)
    assert group.leader.unavailable_reason
    for stage in group.stages:
        if stage.rank != reachable:
            group.world.wire.cut.add(stage.control)
    if first == "client":
        client, theirs = group.ask(), group.offer()
    else:
        theirs = group.offer()
        group.clock.play(0.05)
        assert not theirs.at.told
        client = group.ask()
    assert client.told
    group.clock.play(0.05)
    assert theirs.at.record.state.cause == Cause(
        Code.PEER_LOST, "rank 2 of the group's 4 is missing"
    )
    assert not failures(group), "it was never opened"
    group.world.wire.cut.clear()
    group.world.lines.cut.clear()
    group.clock.play(10.0)
    group.at_rest()


def test_a_stage_whose_transfer_fails_alone(group: Stages) -> None:
    group.faults.next_write = "error"
    client, theirs = group.ask(), group.offer()
    group.clock.play(HEAR_S)
    assert client.told
    assert theirs.at.told
    assert failures(group) == {f"failed {Code.TRANSFER_ERROR}": 1}
    group.clock.play(2.0)
    assert not any(stage.member.tickets or stage.endpoint.rooms for stage in group.stages)
    endings = [stage.counts.endings for stage in group.stages]
    assert all(sum(ended.values()) == 1 and not ended.get("success") for ended in endings)


def test_the_leader_dies_and_comes_back(group: Stages) -> None:
    leader = group.stages[0]
    client = group.ask()
    group.clock.play(0.1)
    group.world.kill(leader)
    assert client.told
    group.start_again(0)
    group.clock.play(10.0)
    group.at_rest()
    group.assert_served(8)
