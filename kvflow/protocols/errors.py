"""One tree of errors, sorted by the party that has to act.

KvflowError
├── MisuseError            the caller broke a rule of the API; nothing was sent
│   ├── LayoutError        a pool that cannot be described, or two pools that do not fit
│   ├── OwnershipError     double free, or pages that the caller does not own or may not use
│   ├── RoomInUseError     a room id whose earlier room is still open or draining
│   └── CapacityError      more pages, rooms or bytes requested than there are (a retry may help)
│       ├── QuarantineError  too many pages wait for proof that no peer writes into them
│       └── HostMemoryError  the host memory for snapshots is full
├── PeerError              the peer broke the protocol
│   ├── WireError          bytes that are not a message
│   └── RefusedError       the peer understood, and declined
├── TransferError          the data plane failed, or does not know what landed
├── AbortedError           one of the two sides ended the room on purpose
└── LostError              the peer, or the link to it, is gone
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_CAUSE_TEXT = 2048


class Code(StrEnum):
    """The reason why a room ended, as spelled on the wire and in metrics."""

    CLIENT_GONE = "client_gone"
    ABORTED = "aborted"
    DEADLINE = "deadline"
    RENDEZVOUS = "rendezvous"
    CAPACITY = "capacity"
    REFUSED = "refused"
    BAD_REQUEST = "bad_request"
    PROMPT_MISMATCH = "prompt_mismatch"
    ROOM_IN_USE = "room_in_use"
    STALE_GRANT = "stale_grant"
    ENGINE_ERROR = "engine_error"
    TRANSFER_ERROR = "transfer_error"
    PROTOCOL_ERROR = "protocol_error"
    PEER_LOST = "peer_lost"
    SHUTDOWN = "shutdown"


class Cause(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The reason why a room ended. A room keeps its first cause."""

    code: Code
    text: str = ""

    def __post_init__(self) -> None:
        # The tuple hides the declared types from mypy, which would call a plain check redundant.
        given: tuple[object, object] = (self.code, self.text)
        if not isinstance(given[0], Code) or not isinstance(given[1], str):
            raise MisuseError(
                f"a cause is a kvflow.Code and a text, not {self.code!r} and {self.text!r}"
            )
        # Causes are kept for a long time, and a peer chooses the text of some of them, so long
        # texts are cut.
        if len(self.text) > MAX_CAUSE_TEXT:
            msgspec.structs.force_setattr(self, "text", self.text[:MAX_CAUSE_TEXT])

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.text else str(self.code)


class KvflowError(Exception):
    """Base class of every error that kvflow raises on purpose."""

    code: Code = Code.ENGINE_ERROR

    def cause(self) -> Cause:
        """Return the cause to send to the peer. For an error from `room_error`, this equals the
        cause that `room_error` received.
        """
        # `room_error` puts the code before the text, but a cause has its own field for the code.
        text = str(self)
        return Cause(self.code, "" if text == self.code else text.removeprefix(f"{self.code}: "))


class MisuseError(KvflowError):
    """The caller broke a rule of the API."""

    code = Code.BAD_REQUEST


class LayoutError(MisuseError):
    """A pool cannot be described, or two pools do not fit together."""


class OwnershipError(MisuseError):
    """A page has another owner, was freed twice, or must not be used now."""


class RoomInUseError(MisuseError):
    """A room with that id is still open, or its writes still drain."""

    code = Code.ROOM_IN_USE


class CapacityError(MisuseError):
    """The caller asked for more pages, rooms or bytes than there are."""

    code = Code.CAPACITY

    def __init__(self, what: str, asked: int, limit: int) -> None:
        super().__init__(f"{what}: asked for {asked}, limit {limit}")
        self.what, self.asked, self.limit = what, asked, limit


class QuarantineError(CapacityError):
    """Too many pages wait for proof that no peer writes into them any more."""

    def __init__(self, quarantined: int, limit: int, page_size: int = 0) -> None:
        """With a `page_size`, the text also counts tokens, the unit that clients know."""
        super().__init__("pages in quarantine", quarantined, limit)
        tokens = f" ({quarantined * page_size} and {limit * page_size} tokens)" if page_size else ""
        text = (
            f"{quarantined} pages are in quarantine, more than {limit}{tokens}: no new room until "
            "their writers are proven gone"
        )
        self.args = (text,)


class HostMemoryError(CapacityError):
    """The host memory for snapshots is full, or smaller than the snapshot."""

    def __init__(self, unit: str, asked: int, free: int, limit_bytes: int) -> None:
        super().__init__(f"{unit}s of host memory", asked, free)
        self.args = (
            f"a snapshot needs {asked} {unit}s of host memory, and {free} are free of its "
            f"{limit_bytes} bytes: close snapshots, or give it more",
        )


class PeerError(KvflowError):
    """The peer broke the protocol."""

    code = Code.PROTOCOL_ERROR


class WireError(PeerError):
    """The bytes received are not a message."""


class RefusedError(PeerError):
    """The peer understood the request and declined it."""

    code = Code.REFUSED


class TransferError(KvflowError):
    """The data plane failed, or does not know what landed."""

    code = Code.TRANSFER_ERROR


class LostError(KvflowError):
    """The peer, or the link to it, is gone."""

    code = Code.PEER_LOST


class AbortedError(KvflowError):
    """One of the two sides ended the room on purpose."""

    code = Code.CLIENT_GONE


_BY_CODE: dict[Code, type[KvflowError]] = {
    Code.CLIENT_GONE: AbortedError,
    Code.ABORTED: AbortedError,
    Code.SHUTDOWN: AbortedError,
    Code.DEADLINE: AbortedError,
    Code.RENDEZVOUS: LostError,
    Code.PEER_LOST: LostError,
    Code.TRANSFER_ERROR: TransferError,
    Code.PROTOCOL_ERROR: PeerError,
}


def room_error(cause: Cause) -> KvflowError:
    """Return the exception that a room's user receives for `cause`. The code of the cause
    determines the exception's class, and becomes its `code`.
    """
    error = _BY_CODE.get(cause.code, RefusedError)(str(cause))
    error.code = cause.code
    return error
