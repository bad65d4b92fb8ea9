"""Bytes to messages and back.

Parsing is strict: what is not a message this side may receive is a WireError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire.group import ToLeader, ToMember
from kvflow.protocols.wire.messages import MAX_FRAME_BYTES, Incarnation, ToDecode, ToPrefill

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not what they should be: strings of any bytes, nesting of
any depth.
"""

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


def parser(messages: Any) -> Callable[[bytes], Any]:
    """What turns a frame into a message, or into one of a union of them.

    Raises, when called: WireError.
    """
    decode = msgspec.msgpack.Decoder(messages).decode

    def parse(frame: bytes) -> Any:
        """Raises: WireError."""
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


def prompt_digest(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """SHA-256 over the token ids as little-endian u32:
    how the two legs agree on the prompt (I8).
    """
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<u4").data).digest()


def routing_id(incarnation: Incarnation) -> bytes:
    """The ZMQ routing id of an incarnation; the leading byte keeps it from starting with zero,
    which ZMQ reserves.
    """
    return b"k" + incarnation.to_bytes(8, "big")
