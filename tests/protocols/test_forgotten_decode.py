"""A decode that prefill has forgotten, refused or seen to die, and that registers again: what had
ended for it does not begin again (I6).

Found by the bare simulator.
"""

from __future__ import annotations

from kvflow.protocols.commands import SendToDecode
from kvflow.protocols.errors import Code
from kvflow.protocols.limits import Bounds
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.wire.codec import encode, parse_at_decode, routing_id
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    AbortAck,
    Announce,
    GrantId,
    Incarnation,
    Message,
    Rank,
    Register,
    RoomFailed,
    RoomId,
)
from kvflow.telemetry.counters import Counts

LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=8)
PREFILL, DECODE = Incarnation(11), Incarnation(22)
ADDRESS = PlaneAddress("fake", "there", ProcessIdentity("boot", "pid:[1]", 1, 1))


class Talk:
    """What decode 22 says to a prefill, and what it is told."""

    def __init__(self, bounds: Bounds | None = None) -> None:
        identity = PrefillIdentity(PREFILL, Rank(0), LAYOUT, ADDRESS)
        self.prefill = PrefillEndpoint(identity, observer=Counts(), bounds=bounds)

    def say(self, message: Message) -> list[Message]:
        self.prefill.receive(routing_id(DECODE), encode(message), 0.0)
        return self.heard()

    def heard(self) -> list[Message]:
        sent = [command for command in self.prefill.commands() if isinstance(command, SendToDecode)]
        return [parse_at_decode(command.frame) for command in sent]

    def register(self, fresh_from: int = 1) -> list[Message]:
        return self.say(
            Register(
                source=PREFILL,
                target=DECODE,
                wire_version=WIRE_VERSION,
                layout=LAYOUT,
                address=ADDRESS,
                fresh_from=GrantId(fresh_from),
            )
        )

    def refuse_route(self) -> list[Message]:
        self.prefill.route_refused(DECODE, "no descriptor is left", 0.0)
        return self.heard()

    def announce(self, grant: int) -> list[Message]:
        return self.say(
            Announce(room=RoomId(7), grant=GrantId(grant), source=PREFILL, target=DECODE)
        )


def assert_stale(told: list[Message]) -> None:
    failed, acknowledged = told
    assert isinstance(failed, RoomFailed) and failed.cause.code is Code.STALE_GRANT
    assert isinstance(acknowledged, AbortAck) and acknowledged.drained


def test_an_announcement_that_ended_with_the_refusal_does_not_begin_again() -> None:
    talk = Talk()
    talk.register()
    talk.announce(3)
    told = talk.refuse_route()
    assert any(
        isinstance(message, AbortAck) and message.grant == 3 and message.drained for message in told
    )
    talk.register()
    assert_stale(talk.announce(3))
    assert talk.announce(4) == []


def test_it_is_remembered_through_a_second_refusal() -> None:
    talk = Talk()
    talk.register()
    talk.announce(3)
    talk.refuse_route()
    talk.register()
    talk.refuse_route()
    talk.register()
    assert_stale(talk.announce(3))


def test_it_is_remembered_through_a_refusal_of_a_later_registration() -> None:
    """Decode comes back and asks for later grants only, is refused, and its first Register arrives
    once more.
    """
    talk = Talk()
    talk.register()
    talk.announce(3)
    talk.refuse_route()
    talk.register(fresh_from=9)
    talk.refuse_route()
    talk.register()
    assert_stale(talk.announce(3))
    assert_stale(talk.announce(8))
    assert talk.announce(9) == []


def test_it_is_remembered_when_it_had_asked_for_later_grants_before_it_was_forgotten() -> None:
    talk = Talk()
    talk.register()
    talk.announce(3)
    talk.register(fresh_from=9)
    talk.refuse_route()
    talk.register()
    assert_stale(talk.announce(3))


def test_what_a_dead_decode_had_sent_before_begins_nothing() -> None:
    """Its death is observed before the last of its messages has been read."""
    talk = Talk()
    talk.register()
    talk.prefill.route_opened(DECODE, 0.0)
    talk.announce(3)
    talk.prefill.peer_died(DECODE, 0.0)
    talk.heard()
    assert not talk.prefill.core.peers
    talk.register()
    assert_stale(talk.announce(3))


def test_nothing_is_kept_of_a_decode_that_announced_nothing_and_little_of_the_others() -> None:
    talk = Talk(Bounds(closed_grants=2))
    talk.register()
    talk.refuse_route()
    assert not talk.prefill.core.former.displaced
    talk.register()
    talk.announce(1)
    talk.refuse_route()
    assert talk.prefill.core.former.displaced == {DECODE: 2}
