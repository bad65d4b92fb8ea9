"""The full size of slow tests that look for what is rare.

`make slow` runs them small, at a size that still finds each planted bug. With TEST_SOAK=1, which
`make soak` sets, they run at full size, and those marked `soak` run too: more planes, families and
victims of what another test shows with one of them.
"""

from __future__ import annotations

import os
from typing import TypeVar

Size = TypeVar("Size")
SOAKING = os.environ.get("TEST_SOAK") == "1"


def sized(small: Size, full: Size) -> Size:
    """Return `full` in a soak, and `small` otherwise."""
    return full if SOAKING else small
