"""Encoding and parsing of messages. A frame that this side may not receive raises WireError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.group import ToLeader, ToMember
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES, Incarnation, ToDecode, ToPrefill

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding raises for hostile bytes, which may hold strings that are not UTF-8 and
nesting of any depth.
"""

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def parser(messages: Any) -> Callable[[bytes], Any]:
    """Return a function that parses a frame as one of `messages`, or raises WireError."""
    decode = msgspec.msgpack.Decoder(messages).decode

    def parse(frame: bytes) -> Any:
        if len(frame) > MAX_FRAME_BYTES:
            raise WireError(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            return decode(frame)
        except UNDECODABLE as error:
            raise WireError(f"cannot decode a {len(frame)}-byte frame: {error}") from None

    return parse


parse_at_prefill: Callable[[bytes], ToPrefill] = parser(ToPrefill)
parse_at_decode: Callable[[bytes], ToDecode] = parser(ToDecode)
parse_at_leader: Callable[[bytes], ToLeader] = parser(ToLeader)
parse_at_member: Callable[[bytes], ToMember] = parser(ToMember)


def routing_id(incarnation: Incarnation) -> bytes:
    """Return the ZMQ routing id of an incarnation."""
    # ZMQ reserves ids that begin with a zero byte, and an incarnation may begin with one.
    return b"k" + incarnation.to_bytes(8, "big")
