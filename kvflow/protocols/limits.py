"""Times and bounds of the control plane, one place for both roles."""

from __future__ import annotations

import msgspec

from kvflow.protocols.errors import MisuseError

MAX_TIME_S = 30 * 86_400
LEAST_WAIT_S = 0.001  # of what is repeated: a shorter wait would keep the event loop busy


def check_time(name: str, value_s: float, least_s: float = 0) -> float:
    """Seconds that a user passes.

    Raises: MisuseError naming them and their limits, also for NaN.
    """
    try:
        if least_s <= value_s <= MAX_TIME_S:
            return value_s
    except TypeError:
        pass
    raise MisuseError(
        f"{name} {value_s!r} is not a number of seconds between {least_s:g} and {MAX_TIME_S}"
    )


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds.

    Deadlines measure liveness: a peer that answers heartbeats is never lost, however loaded it is.
    """

    heartbeat_s: float = 1.0
    # Without a heartbeat for this long the link is lost: rooms end, loans do not.
    lost_after_s: float = 5.0
    # Register, Announce, Abort and Resync are repeated after this long without an answer.
    repeat_after_s: float = 0.4
    # How long half a room waits for a partner that has not announced itself.
    rendezvous_s: float = 5.0
    # How long prefill keeps a decode's announcement, if its engine's half never comes.
    announced_s: float = MAX_TIME_S
    register_s: float = 10.0  # how long an opening room waits for a prefill that does not answer

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_time(name, getattr(self, name), 0 if name == "rendezvous_s" else LEAST_WAIT_S)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How much is remembered, how much one request may ask for, and how much of a pool may wait for
    proof.
    """

    closed_grants: int = 65_536  # per peer
    kept_bytes: int = 256 << 20  # of hand-overs that decodes may still ask for, over all of them
    ended_halves: int = 65_536
    targets: int = 1_024  # decodes registered at one prefill
    decodes_per_process: int = 64  # of them, lives that one process claims: each costs a descriptor
    decodes_per_address: int = 256  # of them, those whose connections come from one network address
    rooms: int = 32_768  # at prefill; decodes open none above it
    links: int = 512  # prefill ranks one decode is connected to
    ranks_per_room: int = 64
    quarantine_share: float = 0.5  # of decode's pages: above it no room is opened
    pinned_share: float = (
        # Of prefill's pages, read by writes of one decode's ended rooms: above it, none of its own.
        1.0
    )

    def pinned_limit(self, num_pages: int) -> int:
        """Of a pool of so many pages."""
        return int(self.pinned_share * num_pages)

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not name.endswith("_share"):
                if not isinstance(value, int) or value < 0:
                    raise MisuseError(f"{name} {value!r} is not a whole number")
            elif not 0 <= value <= 1:
                raise MisuseError(f"{name} {value!r} is not between 0 and 1")
