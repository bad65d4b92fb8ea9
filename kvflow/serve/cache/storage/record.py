"""What stands before the bytes of a page in a store, so that nothing else is taken for them.

Everything in a header but the checksum of the bytes is known to who asks for a page. So it is not
parsed: the header that ought to be there is made from the bytes that were read, and compared with
the one that is.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64

_HEADER = struct.Struct("<8sII32s32sQ8s8s")
# Magic, version, size of the header, identity, key, length, checksum of the bytes, checksum of all
# before it.
_MAGIC = b"kvflowL3"
_VERSION = 1
HEADER_BYTES = _HEADER.size


def header_of(identity: bytes, key: bytes, value: memoryview) -> bytes:
    """Of a page's bytes; sums them, without the GIL where they are many."""
    fields = (_MAGIC, _VERSION, HEADER_BYTES, identity, key, value.nbytes, xxh3_64(value).digest())
    head = _HEADER.pack(*fields, b"")[:-8]
    return head + xxh3_64(head).digest()


def flaw_in(header: bytes, identity: bytes, key: bytes, value: memoryview) -> str:
    """What is wrong with a record that was read; empty when it is the page of this key and
    identity, byte for byte.
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
