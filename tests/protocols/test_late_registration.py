"""What decode withdrew while its registration was still unanswered is asked for at once when it is
accepted (I4).

Found by the bare simulator: prefill drops the Abort of a decode that it does not know yet, and by
the time the Register had got through, decode asked once in eight seconds only.
"""

from __future__ import annotations

from kvflow.protocols.commands import PeerKey, SendToPrefill
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.wire.codec import encode, parse_at_prefill
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Abort,
    GrantId,
    Incarnation,
    Rank,
    Registered,
)
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts

LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=8)
PREFILL, DECODE, CONTROL = Incarnation(11), Incarnation(22), "tcp://prefill:1"
ADDRESS = PlaneAddress("fake", "there", ProcessIdentity("boot", "pid:[1]", 1, 1))


def aborts(decode: DecodeEndpoint) -> int:
    frames = [command.frame for command in decode.commands() if isinstance(command, SendToPrefill)]
    return sum(isinstance(parse_at_prefill(frame), Abort) for frame in frames)


def pass_time(decode: DecodeEndpoint, now: float) -> None:
    while decode.next_tick() <= now:
        decode.tick(now)


def test_a_withdrawal_is_repeated_at_once_when_the_link_comes_up() -> None:
    decode = DecodeEndpoint(DecodeIdentity(DECODE, LAYOUT, ADDRESS), observer=Counts())
    info = RankInfo(0, 1, PREFILL, CONTROL, "fake", "m")
    grant = decode.open_room(7, [info], Prompt(4, b"d" * 32), now=0.0)
    decode.close_room(grant, Cause(Code.CLIENT_GONE, "gone"), 0.0)
    assert aborts(decode) == 1
    now = 0.0
    while now < 5.0:  # unanswered, it is repeated less and less often
        now += 0.1
        pass_time(decode, now)
    assert 1 < aborts(decode) < 6
    answer = Registered(
        source=PREFILL,
        target=DECODE,
        wire_version=WIRE_VERSION,
        rank=Rank(0),
        refusal="",
        address=ADDRESS,
        asked=PREFILL,
        fresh_from=GrantId(1),
    )
    decode.receive(PeerKey(PREFILL, CONTROL), encode(answer), now)
    pass_time(decode, now)
    assert aborts(decode) == 1
    pass_time(decode, now + 0.9)
    assert aborts(decode) == 1, "and from here on as often as at first"
