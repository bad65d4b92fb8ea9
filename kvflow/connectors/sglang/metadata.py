"""What prefill hands over beside the KV cache: the first token, its log-probabilities and so on.

SGLang keeps these in metadata buffers, one slot per request and buffer. Prefill sends its slot with
the last chunk, as the handoff of the room, and decode copies it into its own slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import msgspec

from kvflow.protocols.errors import MisuseError, WireError
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[bytes])


class MetadataSlots:
    """SGLang's metadata buffers in host memory, by address."""

    def __init__(
        self, addresses: Sequence[int], sizes_bytes: Sequence[int], slot_bytes: Sequence[int]
    ) -> None:
        """Buffer i has `sizes_bytes[i]` bytes, in slots of `slot_bytes[i]` bytes.

        Raises: MisuseError if a slot is larger than a handoff may be.
        """
        self._addresses, self._slot_bytes = list(addresses), list(slot_bytes)
        self.num_slots = min(
            (size // slot for size, slot in zip(sizes_bytes, slot_bytes, strict=True)), default=0
        )
        # Each part of the encoded list has a head of at most five bytes, and so has the list.
        if (total := sum(slot_bytes) + 5 * len(self._slot_bytes) + 5) > MAX_HANDOFF_BYTES:
            raise MisuseError(
                f"SGLang's metadata of one request has {total} bytes, limit {MAX_HANDOFF_BYTES}: "
                "request fewer log-probabilities, or a smaller sampling mask"
            )

    def read(self, slot: int) -> bytes:
        """Return a copy of one slot of every buffer. Raises: MisuseError for a wrong slot."""
        return _ENCODER.encode(
            [ctypes.string_at(address, size_bytes) for address, size_bytes in self._places(slot)]
        )

    def write(self, slot: int, handoff: bytes) -> None:
        """Copy a handoff into one slot of every buffer.

        Raises: WireError, and writes nothing, if prefill's buffers differ from these; MisuseError
        for a wrong slot.
        """
        places = self._places(slot)
        try:
            parts = _DECODER.decode(handoff)
        except msgspec.DecodeError as error:
            raise WireError(f"the handoff is not SGLang's metadata: {error}") from None
        sizes = [len(part) for part in parts]
        if sizes != self._slot_bytes:
            raise WireError(
                f"prefill's metadata buffers have slots of {sizes} bytes, and decode's of "
                f"{self._slot_bytes}: start both servers with the same "
                "--disaggregation-enable-kv-checksum, speculative decoding and sampling masks"
            )
        for (address, size_bytes), part in zip(places, parts, strict=True):
            ctypes.memmove(address, part, size_bytes)

    def _places(self, slot: int) -> list[tuple[int, int]]:
        if not 0 <= slot < self.num_slots:
            raise MisuseError(f"metadata slot {slot} is outside 0..{self.num_slots - 1}")
        return [
            (address + slot * size_bytes, size_bytes)
            for address, size_bytes in zip(self._addresses, self._slot_bytes, strict=True)
        ]
