"""Validate and convert arguments from users, and page numbers from peers."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import CapacityError, Cause, Code, LayoutError, MisuseError
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, names_twice
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES, MAX_PAGES_PER_ROOM, RoomId


class CheckedPrompt(NamedTuple):
    """The length and the digest of a prompt: all that a room needs to know about it.

    The digest of a million tokens takes about 3 ms to compute. To keep that work off the event
    loop, call `check_prompt` in a thread and pass its result instead of the prompt.
    """

    tokens: int
    digest: bytes


TokenIds = Sequence[int] | NDArray[np.integer[Any]]
NO_PAGES: PageIndices = np.empty(0, np.int32)
_CLIENT_GONE = Cause(Code.CLIENT_GONE)


def room_id(value: object) -> RoomId:
    """Convert a room id of any integer type to a RoomId. Raises: MisuseError."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise MisuseError(f"room id {value!r} is not an integer") from None
    if not 0 <= number < 1 << 64:
        raise MisuseError(f"room id {number} is not an unsigned 64-bit integer")
    return RoomId(number)


def check_cause(cause: Cause | None) -> Cause:
    """Check and return the cause that a user gave. None means CLIENT_GONE. Raises: MisuseError."""
    if cause is None:
        return _CLIENT_GONE
    if not isinstance(cause, Cause):
        raise MisuseError(f"cause {cause!r} is not a kvflow.Cause")
    return cause


def check_handoff(handoff: bytes) -> bytes:
    """Check that a handoff is bytes, and return it. Raises: MisuseError."""
    if not isinstance(handoff, bytes):
        raise MisuseError(f"the handoff must be bytes, not {type(handoff).__name__}: encode it")
    return handoff


def prompt_digest(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Return the SHA-256 of the ids as little-endian u32. The halves of a room compare it (I8)."""
    # `data` passes the array to the hash without a copy: a prompt may have a million tokens.
    return hashlib.sha256(np.ascontiguousarray(token_ids, dtype="<u4").data).digest()


def check_prompt(prompt: TokenIds | CheckedPrompt) -> CheckedPrompt:
    """Check a prompt, and return its token count and digest. Raises: MisuseError."""
    if isinstance(prompt, CheckedPrompt):
        return prompt
    ids = np.asarray(prompt)
    # Every unsigned type of at most 32 bits holds only valid ids, so the values need no check.
    if ids.dtype.kind == "u" and ids.itemsize <= 4 and ids.ndim == 1 and ids.size:
        return CheckedPrompt(ids.size, prompt_digest(ids))
    if ids.ndim == 1 and not ids.size:
        raise MisuseError("the prompt is empty: at least 1 token is needed")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise MisuseError(
            f"the prompt must be a list of token ids, not shape {ids.shape} of {ids.dtype}"
        )
    # The conversion changes an id that is negative or too large, so one comparison checks both
    # bounds.
    narrow = ids.astype(np.uint32)
    if np.count_nonzero(narrow != ids):
        low, high = int(ids.min()), int(ids.max())
        raise MisuseError(f"token id {low if low < 0 else high} is not an unsigned 32-bit integer")
    return CheckedPrompt(ids.size, prompt_digest(narrow))


def pages_wanted(layout: PoolLayout, tokens: int, prefix_tokens: int) -> int:
    """Return the number of places that a room fills at decode: one for each page after the prefix,
    and one for the row if the pool has rows.

    Raises: MisuseError for a prefix that is neither a whole number of pages nor the whole prompt,
    CapacityError if the room would fill more than `MAX_PAGES_PER_ROOM` places.
    """
    size = layout.page_size
    wanted = -(-tokens // size) + bool(layout.num_rows)
    if prefix_tokens:
        if not 0 < prefix_tokens <= tokens or (prefix_tokens % size and prefix_tokens != tokens):
            raise MisuseError(
                f"prefix_tokens {prefix_tokens} is neither a whole number of {size}-token pages "
                f"nor all of the {tokens} tokens of the prompt"
            )
        wanted -= -(-prefix_tokens // size)
    if wanted > MAX_PAGES_PER_ROOM:
        most = MAX_PAGES_PER_ROOM * size
        raise CapacityError("tokens of one room, in whole pages", wanted * size, most)
    return wanted


def own_pages(
    pages: Sequence[int] | PageIndices, layout: PoolLayout, room: int, wanted: int
) -> PageIndices:
    """Check the pages that a user provides for a room, and return them as int32 [n]. `wanted` is
    the number of places that the room needs, including its row. Raises: MisuseError.
    """
    found = page_indices(pages, layout.num_places, f"room {room}")
    if len(found) != wanted:
        given, needed = _counted(layout, found), _needed(layout, wanted)
        raise MisuseError(
            f"room {room}: {given} given, its prompt needs "
            f"{needed}{_row_hint(layout, 'as the last')}"
        )
    if wanted and names_twice(found, int(found.min()), int(found.max())):
        raise MisuseError(f"room {room}: a page is given twice")
    return found


def check_chunk(
    room: int, layout: PoolLayout, pages: PageIndices, left: int, last: bool, handoff_bytes: int
) -> None:
    """Check the `pages` of a chunk for a room that still has `left` places to fill at decode. Only
    the last chunk may fill the row.

    Raises: MisuseError (a wrong number of pages, a handoff before the last chunk), CapacityError
    (a handoff that is too large).
    """
    if len(pages) != left if last else len(pages) > left - bool(layout.num_rows):
        given, needed = _counted(layout, pages), _needed(layout, left)
        hint = _row_hint(layout, "the last, with last=True")
        raise MisuseError(f"room {room}: chunk of {given}, {needed} of decode's are left{hint}")
    if not len(pages) and not last:
        raise MisuseError(f"room {room}: a chunk without pages that is not the last")
    if handoff_bytes and not last:
        raise MisuseError(
            f"room {room}: handoff of {handoff_bytes} bytes with a chunk that is not the last"
        )
    if handoff_bytes > MAX_HANDOFF_BYTES:
        raise CapacityError("bytes of handoff", handoff_bytes, MAX_HANDOFF_BYTES)


def _counted(layout: PoolLayout, indices: PageIndices) -> str:
    if not layout.num_rows:
        return f"{indices.size} pages"
    pages, rows = layout.split(indices)
    return f"{pages.size} pages and {rows.size} rows"


def _needed(layout: PoolLayout, count: int) -> str:
    return f"{count - 1} pages and 1 row" if layout.num_rows else str(count)


def _row_hint(layout: PoolLayout, where: str) -> str:
    return f" (row r is given as {layout.num_pages} + r, {where})" if layout.num_rows else ""


def page_indices(pages: Sequence[int] | NDArray[Any], num_pages: int, what: str) -> PageIndices:
    """Convert a user's page numbers to int32 [n]. Raises: MisuseError for the first fault."""
    array = np.asarray(pages)
    # Rooms of one page are common. For one page, this check is several times as fast as the
    # general checks below.
    if array.shape == (1,) and array.dtype == np.int32 and 0 <= array[0] < num_pages:
        return array.copy()
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise MisuseError(
            f"{what}: pages must be a list of integers, not shape {array.shape} of {array.dtype}"
        )
    if array.size and ((low := int(array.min())) < 0 or int(array.max()) >= num_pages):
        raise MisuseError(
            f"{what}: page {low if low < 0 else int(array.max())} is outside 0..{num_pages - 1}"
        )
    # `astype` copies: the caller may change its array while the room uses these numbers.
    return array.astype(np.int32) if array.size else NO_PAGES


def pack_pages(pages: PageIndices) -> bytes:
    """Encode page indices for the wire, as packed little-endian int32."""
    return np.ascontiguousarray(pages, dtype="<i4").tobytes()


def unpack_pages(packed: bytes, num_pages: int) -> PageIndices:
    """Decode page indices from the wire, and check them against the size of the pool.

    Raises: LayoutError for a length that is not a multiple of 4, an index outside 0..num_pages-1,
    or a page named twice.
    """
    if len(packed) % 4:
        raise LayoutError(f"pages: {len(packed)} bytes are not a list of int32 indices")
    pages = np.frombuffer(packed, dtype="<i4")
    # Rooms of one page are common. For one page, this check is several times as fast as the
    # general checks below.
    if pages.size == 1 and 0 <= pages[0] < num_pages:
        return pages
    if pages.size:
        # Decode's allocator returns ascending pages when it can. If the pages ascend, the first is
        # the smallest, the last is the largest, and no page occurs twice.
        ascending = bool((pages[1:] > pages[:-1]).all())
        low, high = (
            (int(pages[0]), int(pages[-1])) if ascending else (int(pages.min()), int(pages.max()))
        )
        if low < 0 or high >= num_pages:
            raise LayoutError(
                f"pages: index {low if low < 0 else high} is outside 0..{num_pages - 1}"
            )
        if not ascending and names_twice(pages, low, high):
            raise LayoutError("pages: a page is named twice")
    return pages
