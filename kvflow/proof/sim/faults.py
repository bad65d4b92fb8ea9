"""Faults of one run. The kinds are drawn from the seed, and every strike is counted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

ON_FRAMES = ("drop", "delay", "duplicate", "reorder", "garbage")
ON_WRITES = ("slow", "stuck", "late", "error")
ON_NODES = ("crash", "restart", "leave", "freeze", "takeover", "stall")
ON_LINKS = ("partition", "jam")
KINDS = (*ON_FRAMES, *ON_LINKS, *ON_WRITES, "capacity", *ON_NODES)
ON_COPIES = ("slow copy", "failed copy", "no host memory")
"""Faults of copies to and from host memory. Only whole nodes draw them, after the other kinds."""
SWITCH = "switch"
"""A node shuts down cleanly, and a node of the other role takes over its pool. Only scenarios with
a `Switch` have this fault.
"""

# Bounds of the mean number of frames, writes, takes or copies per fault. A run draws the mean for
# each kind of fault.
_EVERY_FRAMES = (3, 25)
_EVERY_WRITES = (2, 6)
_EVERY_TAKES = (3, 9)
_EVERY_COPIES = (2, 6)


class Faults:
    """Kinds of faults in one run, at least two. `calm` ends them all."""

    def __init__(self, rng: random.Random, *, copies: bool = False) -> None:
        """Draw the kinds of faults. With `copies`, they may include those in `ON_COPIES`."""
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
                    # The first fault of a kind comes early, so that the kind strikes at all.
                    self._next[kind] = rng.randint(1, 4)
        self._frames = [kind for kind in ON_FRAMES if kind in self.kinds]
        self._writes = [kind for kind in ON_WRITES if kind in self.kinds]
        self._copies = [kind for kind in ON_COPIES[:2] if kind in self.kinds]

    def calm(self) -> None:
        self.on = False

    def strike(self, kind: str) -> None:
        self.struck[kind] += 1

    def of_frame(self) -> str:
        """Return the fault of the next frame, or an empty string if there is none."""
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
                # The distance is random around the drawn mean, so that faults are not periodic.
                self._next[kind] = self.rng.randint(1, 2 * self._every[kind])
                self.struck[kind] += 1
                return kind
        return ""


def spoilt(rng: random.Random, data: bytes, is_message: Callable[[bytes], bool]) -> bytes:
    """Return bytes that are not a message: a frame cut short or changed, or random bytes."""
    at = rng.randrange(len(data))
    ways = (
        data[:at],
        data[:at] + bytes([data[at] ^ rng.randint(1, 255)]) + data[at + 1 :],
        rng.randbytes(at),
    )
    found = rng.choice(ways)
    return b"\xc1" + found if is_message(found) else found
