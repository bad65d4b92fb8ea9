"""What goes wrong in one run: drawn from the seed beforehand, counted when it strikes."""

from __future__ import annotations

import random
from collections import Counter

ON_FRAMES = ("drop", "delay", "duplicate", "reorder", "garbage")
ON_WRITES = ("slow", "stuck", "late", "error")
ON_NODES = ("crash", "restart", "leave", "freeze", "takeover", "stall")
ON_LINKS = ("partition", "jam")
KINDS = (*ON_FRAMES, *ON_LINKS, *ON_WRITES, "capacity", *ON_NODES)
ON_COPIES = ("slow copy", "failed copy", "no host memory")
"""Of snapshots, which only whole nodes make; drawn beside the others."""
SWITCH = "switch"
"""A node parts in order, and one of the other role goes on over its pool; drawn beside the others,
too.
"""

_EVERY_FRAMES = (3, 25)  # a kind strikes once in so many frames, drawn per run
_EVERY_WRITES = (2, 6)
_EVERY_TAKES = (3, 9)
_EVERY_COPIES = (2, 6)


class Faults:
    """At least two kinds in every run. `calm` ends them all."""

    def __init__(self, rng: random.Random, *, copies: bool = False) -> None:
        """`copies`: there are some, and what goes wrong with them is drawn, too."""
        self.rng = rng
        self.kinds = frozenset(rng.sample(KINDS, rng.randint(2, 5)))
        if copies:
            self.kinds |= {kind for kind in ON_COPIES if rng.random() < 0.4}
        self.struck: Counter[str] = Counter()
        self.on = True
        self._every: dict[str, int] = {}
        self._next: dict[str, int] = {}
        for kinds, every in (
            *((ON_FRAMES, _EVERY_FRAMES), (ON_WRITES, _EVERY_WRITES)),
            *((("capacity",), _EVERY_TAKES), (ON_COPIES, _EVERY_COPIES)),
        ):
            for kind in kinds:
                if kind in self.kinds:
                    self._every[kind] = rng.randint(*every)
                    # The first comes early: each kind of a run strikes in it.
                    self._next[kind] = rng.randint(1, 4)
        self._frames = [kind for kind in ON_FRAMES if kind in self.kinds]
        self._writes = [kind for kind in ON_WRITES if kind in self.kinds]
        self._copies = [kind for kind in ON_COPIES[:2] if kind in self.kinds]

    def calm(self) -> None:
        self.on = False

    def strike(self, kind: str) -> None:
        """A fault that was planned by time has come."""
        self.struck[kind] += 1

    def of_frame(self) -> str:
        """What happens to the next frame; empty for nothing."""
        return self._of(self._frames)

    def of_write(self) -> str:
        return self._of(self._writes)

    def of_take(self) -> bool:
        return bool(self._of(["capacity"])) if "capacity" in self.kinds else False

    def of_copy(self) -> str:
        return self._of(self._copies)

    def of_host_memory(self) -> bool:
        return bool(self._of(["no host memory"])) if "no host memory" in self.kinds else False

    def _of(self, kinds: list[str]) -> str:
        if not self.on:
            return ""
        for kind in kinds:
            self._next[kind] -= 1
            if self._next[kind] <= 0:
                self._next[kind] = self.rng.randint(1, 2 * self._every[kind])
                self.struck[kind] += 1
                return kind
        return ""
