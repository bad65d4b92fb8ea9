"""The mirror image of a decode, in which its two prefill ranks are exchanged."""

from __future__ import annotations

from typing import Any

import msgspec

from kvflow.proof.walk.decode_side import Decode
from kvflow.proof.walk.world import World
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.machinery import Timer


def mirrored(decode: Decode, world: World) -> Decode:
    if not decode.alive:
        return decode
    endpoint = world.decodes.take(decode.endpoint)
    _swap(endpoint)
    return decode._replace(
        endpoint=world.decodes.put(endpoint),
        watched=frozenset((1 - rank, life) for rank, life in decode.watched),
        declared=frozenset((1 - rank, life) for rank, life in decode.declared),
        ranks=decode.ranks[::-1],
    )


def _swap(endpoint: DecodeEndpoint) -> None:
    # Peers exchange their identities in place, so only columns by rank are reversed.
    core = endpoint.core
    peers: dict[int, PrefillPeer] = {}
    for peer in [*endpoint.peers, *core.ledger._by_source, *core.ledger._acknowledged]:
        peers[id(peer)] = peer
    for record in core.rooms.values():
        peers |= {id(peer): peer for peer in record.peers}
    for peer in peers.values():
        peer.info, peer.key = _other(peer.info), _key(peer.key)
    core.links.peers = {peer.key: peer for peer in endpoint.peers}
    for record in core.rooms.values():
        record.peers, record.next_seq = record.peers[::-1], record.next_seq[::-1]
        state = record.state
        finished = state.finished >> 1 | (state.finished & 1) << 1
        swapped: dict[str, Any] = {"next_seq": state.next_seq[::-1], "filled": state.filled[::-1]}
        record.state = msgspec.structs.replace(state, finished=finished, **swapped)
        for check in record.checks:
            check.rank = 1 - check.rank
    links = [timer for timer in core.deadlines if timer.kind in ("link", "repeat")]
    for timer in links:
        core.deadlines.cancel(timer)
    for timer in links:
        core.deadlines.set(Timer(timer.kind, _key(timer.key)), 1.0)
    if core.links.declared_dead:
        raise NotImplementedError("declare-dead is walked with one rank")


def _other(info: Any) -> Any:
    key = _key(PeerKey(info.incarnation, info.control))
    return msgspec.structs.replace(
        info, rank=1 - info.rank, incarnation=key.incarnation, control=key.control
    )


def _key(key: PeerKey) -> PeerKey:
    rank = key.incarnation % 100 - 1
    control = key.control.replace(f"prefill-{rank}", f"prefill-{1 - rank}")
    return PeerKey(key.incarnation + 1 - 2 * rank, control)  # type: ignore[arg-type]
