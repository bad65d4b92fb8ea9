"""One end of a numbered exchange: messages in order, each once, over a link that may lose, repeat
and reorder them.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")


class Ordered(Generic[M]):
    """What this end has sent and is not confirmed, and how far it has received.

    Both begin at number 0.
    """

    __slots__ = ("_asked", "received_below", "sent_below", "unconfirmed")

    def __init__(self) -> None:
        self.unconfirmed: deque[M] = deque()  # the last ones below `sent_below`
        self.sent_below = self.received_below = 0
        self._asked = -1

    def add(self, message: M) -> None:
        """It has been sent under the number `sent_below`."""
        self.unconfirmed.append(message)
        self.sent_below += 1

    def confirm(self, below: int) -> bool:
        """The other end has everything below; False, and nothing changes, when it cannot have."""
        if below > self.sent_below:
            return False
        for _ in range(len(self.unconfirmed) - (self.sent_below - below)):
            self.unconfirmed.popleft()
        return True

    def take(self, number: int) -> bool:
        """Whether the message of this number is the next one: the caller handles that one, and no
        other.
        """
        if number != self.received_below:
            return False
        self.received_below += 1
        return True

    @property
    def asks(self) -> bool:
        """It has missed a message, and waits for it."""
        return self._asked == self.received_below

    def misses(self, below: int) -> bool:
        """Whether there is a message below that has not come, the first time that it is noticed: it
        must be asked for now, and as long as this end `asks`, with every heartbeat."""
        if below <= self.received_below or self.asks:
            return False
        self._asked = self.received_below
        return True
