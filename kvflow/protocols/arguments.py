"""Validate and convert arguments from users, and page numbers from peers."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import CapacityError, Cause, Code, LayoutError, MisuseError, PeerError
from kvflow.protocols.pages.fine import FinePages, fine_pages
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, names_twice
from kvflow.protocols.pages.spaces import Counts, counts_fit
from kvflow.protocols.wire.messages import MAX_HANDOFF_BYTES, MAX_PAGES_PER_ROOM, Bootstrap, RoomId


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
    # The bits of all ids together are negative if one id is, and above 32 bits if one id is, so one
    # number shows both bounds.
    if not 0 <= int(np.bitwise_or.reduce(ids)) < 1 << 32:
        low, high = int(ids.min()), int(ids.max())
        raise MisuseError(f"token id {low if low < 0 else high} is not an unsigned 32-bit integer")
    return CheckedPrompt(ids.size, prompt_digest(ids))


def pages_wanted(layout: PoolLayout, tokens: int, prefix_tokens: int) -> Counts:
    """Return how many places of each space a room fills at decode, after the prefix.

    Raises: MisuseError for a prefix that is neither a whole number of pages nor the whole prompt,
    CapacityError if the room would fill more than `MAX_PAGES_PER_ROOM` places.
    """
    if prefix_tokens:
        for space in layout.spaces:
            size = space.page_size or 1
            if not 0 < prefix_tokens <= tokens or (
                prefix_tokens % size and prefix_tokens != tokens
            ):
                raise MisuseError(
                    f"prefix_tokens {prefix_tokens} is neither a whole number of {size}-token "
                    f"pages nor all of the {tokens} tokens of the prompt"
                )
    spaces = layout.spaces
    # Most pools are like this, and each side counts every room.
    if len(spaces) == 1 and not spaces[0].window:
        size = spaces[0].page_size
        count = -(-tokens // size) - -(-prefix_tokens // size)
        if count <= MAX_PAGES_PER_ROOM:
            return (count,)
    wanted = layout.wanted(tokens, prefix_tokens)
    if sum(wanted) > MAX_PAGES_PER_ROOM:
        size = layout.page_size
        raise CapacityError(
            "tokens of one room, in whole pages", sum(wanted) * size, MAX_PAGES_PER_ROOM * size
        )
    return wanted


def offered_places(
    ours: PoolLayout, theirs: PoolLayout, message: Bootstrap, page_sizes: Counts = ()
) -> tuple[PageIndices, Counts, FinePages | None]:
    """Return the places of decode's pool that a Bootstrap offers, how many places of ours fill
    them, by space, and None. `ours` is the layout of prefill's pool, and `theirs` that of decode's.

    If their pages have different sizes, `page_sizes` has the smaller size of each space. The result
    then has the fine pages of decode's places, and last the fine pages of ours (see `pages.fine`).

    Raises: MisuseError, PeerError, CapacityError, LayoutError.
    """
    if page_sizes:
        return _offered_fine_pages(ours, theirs, message, page_sizes)
    try:
        wanted = pages_wanted(ours, message.prompt_tokens, message.prefix_tokens)
    except MisuseError as error:
        raise PeerError(str(error)) from None
    pages = unpack_pages(message.pages, theirs.num_places)
    if (counts := theirs.counted(pages)) != wanted or not message.prompt_tokens:
        raise MisuseError(
            f"{theirs.described(counts)} lent, {message.prompt_tokens} tokens need "
            f"{theirs.described(wanted)}"
        )
    if len(theirs.spaces) > 1:
        theirs.check_order(pages)
    return pages, counts, None


def _offered_fine_pages(
    ours: PoolLayout, theirs: PoolLayout, message: Bootstrap, page_sizes: Counts
) -> tuple[PageIndices, Counts, FinePages]:
    tokens, prefix_tokens = message.prompt_tokens, message.prefix_tokens
    lent, _, _ = offered_places(theirs, theirs, message)
    source, target = (
        room_in_fine_pages(side, page_sizes, tokens, prefix_tokens) for side in (ours, theirs)
    )
    return target.of(theirs, lent), ours.wanted(tokens, prefix_tokens), source


def room_in_fine_pages(
    layout: PoolLayout, page_sizes: Counts, tokens: int, prefix_tokens: int
) -> FinePages:
    """Return the fine pages that a room fills in a pool; see `pages.fine`.

    Raises: CapacityError if they are more than `MAX_PAGES_PER_ROOM`.
    """
    found = fine_pages(layout, page_sizes, tokens, prefix_tokens)
    if (count := sum(found.counts)) > MAX_PAGES_PER_ROOM:
        size = min(filter(None, page_sizes), default=1)
        what = "tokens of one room, in whole pages, in the smaller of the two page sizes"
        raise CapacityError(what, count * size, MAX_PAGES_PER_ROOM * size)
    return found


def own_pages(
    pages: Sequence[int] | PageIndices, layout: PoolLayout, room: int, wanted: Counts
) -> PageIndices:
    """Check the places that a user provides for a room, and return them as int32 [n]. `wanted` is
    the number of places of each space that the room needs. Raises: MisuseError, LayoutError.
    """
    found = page_indices(pages, layout.num_places, f"room {room}")
    if (counts := layout.counted(found)) != wanted:
        raise MisuseError(
            f"room {room}: {layout.described(counts)} given, its prompt needs "
            f"{layout.described(wanted)}{_hint(layout)}"
        )
    layout.check_order(found)
    if found.size and names_twice(found, int(found.min()), int(found.max())):
        raise MisuseError(f"room {room}: a page is given twice")
    return found


def check_chunk(
    room: int, layout: PoolLayout, counts: Counts, left: Counts, last: bool, handoff_bytes: int
) -> None:
    """Check the places of a chunk, `counts` of each space, for a room that still has `left` places
    to fill at decode. Only the last chunk may fill rows.

    Raises: MisuseError (a wrong number of places, a handoff before the last chunk), CapacityError
    (a handoff that is too large).
    """
    if counts != left if last else not counts_fit(counts, left):
        raise MisuseError(
            f"room {room}: chunk of {layout.described(counts)}, {layout.described(left)} of "
            f"decode's are left{_hint(layout, sent=True)}"
        )
    if not last:
        if layout.row_space is not None and any(
            count and space.in_rows for count, space in zip(counts, layout.spaces, strict=True)
        ):
            hint = _hint(layout, sent=True)
            raise MisuseError(f"room {room}: a row in a chunk that is not the last{hint}")
        if not any(counts):
            raise MisuseError(f"room {room}: a chunk without pages that is not the last")
        if handoff_bytes:
            raise MisuseError(
                f"room {room}: handoff of {handoff_bytes} bytes with a chunk that is not the last"
            )
    if handoff_bytes > MAX_HANDOFF_BYTES:
        raise CapacityError("bytes of handoff", handoff_bytes, MAX_HANDOFF_BYTES)


def _hint(layout: PoolLayout, *, sent: bool = False) -> str:
    """Return how places are numbered, for errors about a pool of several spaces. If they are sent,
    the hint says of rows when.
    """
    hints = [
        f"{space.unit} n of {space.name!r} is given as {base} + n"
        + (", with the last chunk" if sent and space.in_rows else "")
        for space, base in zip(layout.spaces[1:], layout.bases[1:], strict=True)
    ]
    return f" ({'; '.join(hints)})" if hints else ""


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
