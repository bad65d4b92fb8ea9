"""One tree of errors, by who has to act.

KvflowError
├── MisuseError            the caller broke a rule of the API; nothing was sent
│   ├── LayoutError        a pool that cannot be described, or two that do not fit together
│   ├── OwnershipError     double free, foreign free, pages given to somebody else
│   ├── RoomInUseError     a room id whose last room is open, or drains
│   └── CapacityError      more pages, rooms or bytes than there are (retry later may help)
│       ├── QuarantineError  too many pages wait for proof that nobody writes into them
│       └── HostMemoryError  the host memory for snapshots is full
├── PeerError              the peer said something it must not say
│   ├── WireError          bytes that are no message
│   └── RefusedError       the peer understood, and declined
├── TransferError          the data plane failed, or cannot say what landed
├── AbortedError           the room was ended on purpose, by one of the two sides
└── LostError              the peer, or the link to it, is gone
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_CAUSE_TEXT = 2048


class Code(StrEnum):
    """Why a room ended, as it travels on the wire and stands in metrics."""

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
    """The first thing that went wrong in a room; later ones do not replace it."""

    code: Code
    text: str = ""

    def __post_init__(self) -> None:
        # As a tuple, because mypy takes the declared types for granted and calls a plain check
        # redundant.
        given: tuple[object, object] = (self.code, self.text)
        if not isinstance(given[0], Code) or not isinstance(given[1], str):
            raise MisuseError(
                f"a cause is a kvflow.Code and a text, not {self.code!r} and {self.text!r}"
            )
        if len(self.text) > MAX_CAUSE_TEXT:  # causes are kept, and some come from peers
            msgspec.structs.force_setattr(self, "text", self.text[:MAX_CAUSE_TEXT])

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.text else str(self.code)


class KvflowError(Exception):
    """Root of everything kvflow raises on purpose."""

    code: Code = Code.ENGINE_ERROR

    def cause(self) -> Cause:
        """What travels; of an error made from a cause, that cause again."""
        text = str(self)
        return Cause(self.code, "" if text == self.code else text.removeprefix(f"{self.code}: "))


class MisuseError(KvflowError):
    """The caller broke a rule of the API."""

    code = Code.BAD_REQUEST


class LayoutError(MisuseError):
    """A pool that cannot be described, or two that do not fit together."""


class OwnershipError(MisuseError):
    """A page was freed twice, or by somebody who does not own it."""


class RoomInUseError(MisuseError):
    """A room of that id is open, or drains."""

    code = Code.ROOM_IN_USE


class CapacityError(MisuseError):
    """More was asked for than there is."""

    code = Code.CAPACITY

    def __init__(self, what: str, asked: int, limit: int) -> None:
        super().__init__(f"{what}: asked for {asked}, limit {limit}")
        self.what, self.asked, self.limit = what, asked, limit


class QuarantineError(CapacityError):
    """Too many pages wait for proof that nobody writes into them any more."""

    def __init__(self, quarantined: int, limit: int) -> None:
        super().__init__("pages in quarantine", quarantined, limit)
        text = (
            f"{quarantined} pages are in quarantine, more than {limit}: no new room until their "
            "writers are proven gone"
        )
        self.args = (text,)


class HostMemoryError(CapacityError):
    """The host memory for snapshots is full, or was never as large."""

    def __init__(self, unit: str, asked: int, free: int, limit_bytes: int) -> None:
        super().__init__(f"{unit}s of host memory", asked, free)
        self.args = (
            f"a snapshot needs {asked} {unit}s of host memory, and {free} are free of its "
            f"{limit_bytes} bytes: close snapshots, or give it more",
        )


class PeerError(KvflowError):
    """The peer said something it must not say."""

    code = Code.PROTOCOL_ERROR


class WireError(PeerError):
    """Bytes that are no message."""


class RefusedError(PeerError):
    """The peer understood the request and declined it."""

    code = Code.REFUSED


class TransferError(KvflowError):
    """The data plane failed, or cannot say what landed."""

    code = Code.TRANSFER_ERROR


class LostError(KvflowError):
    """The peer, or the link to it, is gone."""

    code = Code.PEER_LOST


class AbortedError(KvflowError):
    """The room was ended on purpose by one of its two sides."""

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
    """The exception a user of a room sees for `cause`: a class per kind of ending, the first cause
    as its code.
    """
    error = _BY_CODE.get(cause.code, RefusedError)(str(cause))
    error.code = cause.code
    return error
