"""Turns in a tight pool, for rooms that must not wait for each other: first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvflow.proof.bare.holds import Leg, Room
from kvflow.proof.sim.scenario import PROMPT_PAGES_MAX

User = TypeVar("User", Room, Leg)


class Turns(Generic[User]):
    """A queue of users. A turn lasts until the user learns that its room ended.

    Together, the users whose turn it is need at most `PROMPT_PAGES_MAX` pages.
    """

    def __init__(self) -> None:
        self._left = PROMPT_PAGES_MAX
        self._has: dict[User, int] = {}
        self._wait: deque[tuple[User, Callable[[User], None]]] = deque()

    def ask(self, user: User, go: Callable[[User], None]) -> None:
        """Call `go` when it is the user's turn: at once if pages suffice and no user waits."""
        self._wait.append((user, go))
        self._serve()

    def end(self, user: User) -> None:
        """End a user's turn or its wait. A user that never asked has no turn to end."""
        self._left += self._has.pop(user, 0)
        self._serve()

    def _serve(self) -> None:
        while self._wait:
            user, go = self._wait[0]
            if not user.told:
                # Later users must not overtake, or the longest prompt would starve.
                if user.job.num_pages > self._left:
                    return
                self._has[user] = user.job.num_pages
                self._left -= user.job.num_pages
            self._wait.popleft()
            if not user.told:
                go(user)
