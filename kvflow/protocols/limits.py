"""Times and bounds of the control plane, for both roles."""

from __future__ import annotations

import msgspec

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.spaces import Counts

MAX_TIME_S = 30 * 86_400
# Repeating a message after a shorter wait would keep the event loop busy.
LEAST_WAIT_S = 0.001


def check_time(name: str, value_s: float, least_s: float = 0) -> float:
    """Check a number of seconds that a user passes, and return it.

    Raises: MisuseError if `value_s` is not a number, is NaN, or is outside its limits. The error
    names the limits.
    """
    try:
        # NaN fails every comparison, so it needs no check.
        if least_s <= value_s <= MAX_TIME_S:
            return value_s
    except TypeError:
        pass
    raise MisuseError(
        f"{name} {value_s!r} is not a number of seconds between {least_s:g} and {MAX_TIME_S}"
    )


def check_count(name: str, value: int) -> int:
    """Check a number of peers that a user passes, and return it.

    Raises: MisuseError if `value` is no whole number above 0.
    """
    if type(value) is not int or value < 1:  # in Python, `True` is an int
        raise MisuseError(f"{name} {value!r} is not a whole number above 0")
    return value


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the control plane, in seconds.

    Deadlines measure liveness: a peer whose heartbeats arrive is not lost, however loaded it is.
    """

    heartbeat_s: float = 1.0
    # A link is lost when its peer is silent for this long. Its rooms end, but not their loans.
    lost_after_s: float = 5.0
    # An unanswered Register, Announce, Abort, Resync, Goodbye or Join is first repeated after this
    # long.
    repeat_after_s: float = 0.4
    # One half of a room waits this long for the other, if the other was never announced.
    rendezvous_s: float = 5.0
    # Prefill keeps a decode's announcement this long if the engine's half never arrives.
    announced_s: float = MAX_TIME_S
    register_s: float = 10.0  # an opening room waits this long for a prefill that does not answer

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_time(name, getattr(self, name), 0 if name == "rendezvous_s" else LEAST_WAIT_S)


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on what a node remembers, what a request may ask for, and what may wait for proof."""

    closed_grants: int = 65_536  # ended grants that prefill remembers per decode
    # Total bytes of the handoffs that prefill keeps because decodes may request them again.
    kept_bytes: int = 256 << 20
    ended_halves: int = 65_536
    targets: int = 1_024  # decodes registered at one prefill
    # Decodes whose addresses name the same process. Prefill opens a descriptor for each of them.
    decodes_per_process: int = 64
    decodes_per_address: int = 256  # decodes at one network address
    # Heartbeats that prefill takes from all its decodes without a room, per second. Above so many
    # decodes, it asks them for fewer: see `Heartbeat.pace_ms`.
    idle_heartbeats_per_s: int = 100
    rooms: int = 32_768  # open rooms at one prefill; as many more may be announced
    links: int = 512  # prefill ranks that one decode is connected to
    ranks_per_room: int = 64
    # While a larger share of decode's places in some space is overdue (see `Ledger.overdue`),
    # decode opens no room.
    quarantine_share: float = 0.5
    # Share of prefill's pages that unfinished writes for one decode's ended rooms may hold. Above
    # it, prefill refuses new rooms from that decode.
    pinned_share: float = 1.0

    def quarantine_limit(self, counts: Counts) -> Counts:
        """Return `quarantine_share` as numbers of places, in a pool of `counts` places."""
        return tuple(int(self.quarantine_share * count) for count in counts)

    def pinned_limit(self, num_pages: int) -> int:
        """Return `pinned_share` as a number of pages, in a pool of `num_pages`."""
        return int(self.pinned_share * num_pages)

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not name.endswith("_share"):
                if type(value) is not int or value < 0:  # in Python, `True` is an int
                    raise MisuseError(f"{name} {value!r} is not a whole number")
            elif not 0 <= value <= 1:
                raise MisuseError(f"{name} {value!r} is not between 0 and 1")
