"""What strangers and endings may leave behind: nothing, or something bounded (the commands print
the figures).
"""

from __future__ import annotations

import msgspec
import pytest

from kvflow.protocols.errors import KvflowError
from kvflow.protocols.limits import Bounds
from kvflow.protocols.wire.codec import encode, routing_id
from kvflow.protocols.wire.messages import Incarnation
from kvflow.testing.pair import Pair, until
from kvflow.transports.control.memory import Frame
from tests.handlers.scenes import PROMPT, code_of, success
from tests.hostile import endings, strays
from tests.hostile.nodes import register
from tests.hostile.tables import tables
from tests.soak import sized

pytest_plugins = ["kvflow.testing.fixtures"]
LONG = pytest.mark.timeout(900)


# The 400,000 messages take a quarter of a minute of CPU.
@pytest.mark.parametrize(
    "each", [2_000, pytest.param(sized(10_000, 40_000), marks=[pytest.mark.slow, LONG])]
)
async def test_messages_for_rooms_that_never_open(each: int, seed: int) -> None:
    report = await strays.run(each, seed)
    print(report)
    assert not strays.faults(report), report
    assert report["peaks"]["open grants"] > each // 4


@pytest.mark.parametrize(
    "rooms", [1_200, pytest.param(sized(12_000, 40_000), marks=[pytest.mark.slow, LONG])]
)
async def test_rooms_of_every_ending(rooms: int, seed: int) -> None:
    report = await endings.run(rooms, seed)
    print(report)
    grown = [fault for fault in endings.faults(report) if rooms > 10_000 or "left" in fault]
    assert not grown, report


async def test_half_rooms_are_bounded(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    p.prefill.shell.endpoint.core.bounds = Bounds(rooms=3)
    halves = [p.decode.room(room, "sim", PROMPT) for room in range(5)]
    await until(lambda: sum(half.ended for half in halves) == 2)
    await until(lambda: len(p.prefill.shell.endpoint.rooms) == 3)
    for half in halves:
        if half.ended:
            assert await code_of(half.landed()) == "capacity"
    for half in halves:
        half.close()
    await p.rest()
    await success(p, 9)


async def test_nothing_is_kept_of_decodes_that_were_refused(kvflow_pair: Pair) -> None:
    """With a name of its own each: they cannot keep anybody else out."""
    p = kvflow_pair
    await success(p)
    address, layout = p.decode.exported
    space = msgspec.structs.replace(layout.spaces[0], page_size=3)
    layout = msgspec.structs.replace(layout, spaces=(space,))
    tasks = len(p.prefill.shell._tasks)
    for me in range(1, 3_001):
        frame = encode(register(p.prefill.incarnation, me, address, layout))
        p.network.inject(Frame(p.prefill.control, routing_id(Incarnation(me)), True, frame))
    await until(
        lambda: (
            len(p.prefill.shell.endpoint.core.peers) == 1 and len(p.prefill.shell._tasks) == tasks
        )
    )
    other = await p.add_decode()
    await strays.one_room(p, 8, other)
    assert not tables(p)["handler errors"]
    core = p.prefill.shell.endpoint.core
    assert len(core.refused) == core.bounds.targets, (
        "only the last reasons are kept, for announcements that follow"
    )


async def test_a_stolen_name_is_taken_back(kvflow_pair: Pair) -> None:
    """Somebody took our name at prefill: nothing is received any more, until the link is dialled
    anew.
    """
    p = kvflow_pair
    await success(p)
    p.network.connect(p.prefill.control, p.decode.incarnation)  # the thief
    with pytest.raises(KvflowError):
        source, target = await p.open(8, PROMPT)
        p.clock(p.decode).advance(p.timing.lost_after_s + 1)
        await target.landed()
    source.close()
    assert p.decode.peers_by_phase() == {"silent": 1}
    p.clock(p.decode).advance(p.timing.lost_after_s + 1)  # it stays silent: it is dialled anew
    await until(lambda: p.decode.peers_by_phase() in ({"up": 1}, {}))  # idle once room 8 is proven
    await success(p, 9)
