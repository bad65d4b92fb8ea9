"""One end of an exchange that delivers numbered messages in order, once each, over a lossy link."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")


class Ordered(Generic[M]):
    """The messages that this end sent and the other end has not confirmed, and the count of
    messages received. The messages of each direction are numbered from 0.
    """

    __slots__ = ("_asked", "received_below", "sent_below", "unconfirmed")

    def __init__(self) -> None:
        self.unconfirmed: deque[M] = deque()  # their numbers end just below `sent_below`
        self.sent_below = self.received_below = 0
        # The number of the message that this end most recently found missing.
        self._asked = -1

    def add(self, message: M) -> None:
        """Keep a message that is sent with the number `sent_below`, and advance that number."""
        self.unconfirmed.append(message)
        self.sent_below += 1

    def confirm(self, below: int) -> bool:
        """Drop the messages numbered below `below`, which the other end received. Returns False and
        changes nothing if fewer messages were sent.
        """
        if below > self.sent_below:
            return False
        for _ in range(len(self.unconfirmed) - (self.sent_below - below)):
            self.unconfirmed.popleft()
        return True

    def take(self, number: int) -> bool:
        """Accept the next message in order. Returns False for any other number."""
        if number != self.received_below:
            return False
        self.received_below += 1
        return True

    @property
    def asks(self) -> bool:
        """True while this end waits for a message that it missed."""
        return self._asked == self.received_below

    def misses(self, below: int) -> bool:
        """Return True if this call is the first to find that a message is missing, given that
        the other end has sent all messages below `below`. The caller asks for it at once, and with
        every heartbeat while `asks` is true.
        """
        if below <= self.received_below or self.asks:
            return False
        self._asked = self.received_below
        return True
