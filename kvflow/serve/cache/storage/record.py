"""The header before the bytes of a page. It proves that a reader has the right page, intact.

The reader knows every field of the header except the checksum of the bytes. So it does not parse
the header: it builds the expected header from the bytes that it read, and compares the two.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64

# Magic, version, header size, identity, key, length, checksums of the page and of these fields.
_HEADER = struct.Struct("<8sII32s32sQ8s8s")
_MAGIC = b"kvflowL3"
_VERSION = 1
HEADER_BYTES = _HEADER.size


def header_of(identity: bytes, key: bytes, value: memoryview) -> bytes:
    """Return the header for a page with the bytes `value`. It contains their checksum."""
    # xxhash releases the GIL for a long input, so other threads can run meanwhile.
    fields = (_MAGIC, _VERSION, HEADER_BYTES, identity, key, value.nbytes, xxh3_64(value).digest())
    head = _HEADER.pack(*fields, b"")[:-8]
    return head + xxh3_64(head).digest()


def flaw_in(header: bytes, identity: bytes, key: bytes, value: memoryview) -> str:
    """Describe what is wrong with a record, or return "" if it is the expected page."""
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
