"""Planted bugs in goodbyes: sent too early or never, or taken to prove more than they do."""

from __future__ import annotations

from typing import Any

import msgspec

from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped, swapped_item, swaps
from kvflow.protocols.decode import endpoint as decode
from kvflow.protocols.decode import endpoint as decode_endpoint
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.machinery import parsed
from kvflow.protocols.machines.grants import GrantTable
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.wire.messages import Goodbye

PLANTS: list[Plant] = []
bug = planting(PLANTS)


@bug("goodbye not said", nodes=(12, "I5"), bare=(5156, "I5"))
def goodbye_not_said() -> Installed:
    """Prefill leaves without a word."""
    return swapped(PrefillEndpoint, "part", lambda *_: None)


@bug("goodbye before the drain", nodes=(18, "I2"), bare=(20, "I2"))
def goodbye_before_the_drain() -> Installed:
    """Prefill says goodbye as it begins to leave, and names nothing."""
    leave = PrefillEndpoint.leave

    def leave_at_once(self: PrefillEndpoint, now: float) -> None:
        leave(self, now)
        self.part(now)

    # An early goodbye that named its running writes as unproven would be correct.
    named = (GrantTable, "unproven", lambda _: ())
    return swaps([(PrefillEndpoint, "leave", leave_at_once), named])


@bug("goodbye of another incarnation taken as proof", nodes=(13, "I2"), bare=(1, "I2"))
def goodbye_of_another_incarnation() -> Installed:
    """The goodbye of a prefill's successor ends loans of its predecessor."""
    # Make decode attribute every goodbye on a link to the incarnation that it linked.
    receive = decode.DecodeEndpoint.receive

    def receive_any(self: decode.DecodeEndpoint, key: object, frame: bytes, now: float) -> None:
        peer = self.core.links.peers.get(key)  # type: ignore[call-overload]

        def parse(decoder: Any, data: bytes) -> Any:
            message = parsed(decoder, data)
            if type(message) is Goodbye and peer is not None:
                return msgspec.structs.replace(message, source=peer.key.incarnation)
            return message

        with swapped(decode, "parsed", parse):
            receive(self, key, frame, now)  # type: ignore[arg-type]

    return swapped(decode.DecodeEndpoint, "receive", receive_any)


@bug("goodbye proves what it names", nodes=(18, "I2"), bare=(27, "I2"))
def goodbye_proves_what_it_names() -> Installed:
    """Decode ends the loans that prefill cannot vouch for."""
    original = decode_endpoint.HANDLERS[Goodbye]

    def on_goodbye(core: DecodeCore, peer: PrefillPeer, message: Goodbye, now: float) -> None:
        original(core, peer, Goodbye(source=message.source, target=message.target), now)

    return swapped_item(decode_endpoint.HANDLERS, Goodbye, on_goodbye)
