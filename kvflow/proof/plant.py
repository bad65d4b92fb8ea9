"""Declarations of planted bugs: their names, how to install them, and the seeds that find them.

    @bug("free on timer", nodes=(4, "I2"), unseen="it is in decode's shell")
    def free_on_timer() -> Installed:
        \"\"\"Decode takes lent pages back after a while, proof or not.\"\"\"
        return swapped(...)

The keywords `nodes`, `bare`, `group` and `cache` stand for the simulators. Each gives the first
seed with which that simulator finds the bug, and the invariant that this seed breaks first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import getdoc
from typing import NamedTuple

Installed = AbstractContextManager[object]
Install = Callable[[], Installed]
Found = tuple[int, str]
"""First seed that finds a bug, and the invariant that breaks in that seed."""


class Plant(NamedTuple):
    """A planted bug, which once existed in the code or could exist."""

    name: str
    text: str
    install: Install
    found: Mapping[str, Found]  # keyed by simulator
    unseen: str = ""  # the reason why bare endpoints cannot show it


def planting(plants: list[Plant], unseen: str = "") -> Callable[..., Callable[[Install], Install]]:
    """Return a decorator that adds bugs to `plants`. See `Plant` for `unseen`."""

    def bug(
        name: str, text: str = "", *, unseen: str = unseen, **found: Found
    ) -> Callable[[Install], Install]:
        """Add a bug. Its text is the docstring of the function, unless `text` is given."""

        def state(install: Install) -> Install:
            what = " ".join((text or getdoc(install) or "").split())
            plants.append(Plant(name, what, install, found, unseen))
            return install

        return state

    return bug
