"""The header before the bytes of a page in a store, which proves that they are that page.

The reader of a page knows every field of its header but the checksum of the bytes. So the header is
not parsed: the reader makes the expected header from the bytes that it read, and compares the two.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64

# Magic, version, size of the header, identity, key, length, checksum of the bytes, checksum of the
# fields before it.
_HEADER = struct.Struct("<8sII32s32sQ8s8s")
_MAGIC = b"kvflowL3"
_VERSION = 1
HEADER_BYTES = _HEADER.size


def header_of(identity: bytes, key: bytes, value: memoryview) -> bytes:
    """Return the header of a page with the bytes `value`, and its checksum over them."""
    # xxhash releases the GIL for a long input, so that other threads run meanwhile.
    fields = (_MAGIC, _VERSION, HEADER_BYTES, identity, key, value.nbytes, xxh3_64(value).digest())
    head = _HEADER.pack(*fields, b"")[:-8]
    return head + xxh3_64(head).digest()


def flaw_in(header: bytes, identity: bytes, key: bytes, value: memoryview) -> str:
    """Describe the flaw of a record that was read; empty if it is exactly the page of this key
    and identity.
    """
    if header == (expected := header_of(identity, key, value)):
        return ""
    if len(header) < HEADER_BYTES:
        return f"the header has {len(header)} of {HEADER_BYTES} bytes"
    names = (
        "magic",
        "version",
        "size of the header",
        "identity",
        "key",
        "length",
        "checksum of the bytes",
    )
    pairs = zip(
        names, _HEADER.unpack(header[:HEADER_BYTES]), _HEADER.unpack(expected), strict=False
    )
    wrong = [name for name, found, wanted in pairs if found != wanted]
    return f"not as expected: {', '.join(wrong) or 'checksum of the header'}"
