"""The four simulators, each with its planted bugs and with the tables that its seeds can visit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from kvflow.proof.plant import Installed, Plant
from kvflow.proof.rules.outcome import Outcome
from kvflow.proof.sim.coverage import (
    TABLES,
    TABLES_OF_CACHES,
    TABLES_OF_GROUPS,
    TABLES_OF_NODES,
    AnyTable,
)
from kvflow.proof.sim.faults import KINDS, ON_COPIES, SWITCH
from kvflow.protocols.errors import MisuseError


def _silent(_: str) -> None:
    return None


class Simulator(NamedTuple):
    key: str  # keyword for this simulator in `planting`
    how: str  # options of `kvflow sim` that select it
    simulate: Callable[..., Outcome]
    plants: Sequence[Plant]
    tables: Mapping[str, AnyTable]  # tables with cells that its seeds can visit
    faults: tuple[str, ...]  # kinds of fault, each of which must strike in many seeds
    finds_within: int  # number of seeds within which it finds each plant
    hidden: Iterable[Plant] = ()  # plants that it cannot find, with the reason

    def planted(self, name: str) -> Installed:
        """Return a context that installs the plant `name`, or none if `name` is empty.

        Raises: MisuseError if this simulator has no such plant.
        """
        if not name:
            return nullcontext()
        known = {plant.name: plant for plant in self.plants}
        if name in known:
            return known[name].install()
        for plant in self.hidden:
            if plant.name == name:
                raise MisuseError(f"no plant {name!r}, where it cannot be seen: {plant.unseen}")
        raise MisuseError(f"no plant {name!r}; there are: {', '.join(known)}")

    def hunt(
        self, name: str, seeds: Sequence[int], say: Callable[[str], None] = _silent
    ) -> dict[str, Any]:
        """Return the plant's name and, if found, the first seed that shows it and the violation."""
        with self.planted(name):
            for seed in seeds:
                if (violation := self.simulate(seed).violation) is not None:
                    say(f"{name}: seed {seed} breaks {violation.invariant}")
                    return {"plant": name, "seed": seed, **violation._asdict()}
        say(f"{name}: NOT FOUND in {len(seeds)} seeds")
        return {"plant": name}


class Choice(NamedTuple):
    """Options that select a simulator. The default is the simulator of whole nodes."""

    bare: bool = False
    group: int = 0  # number of ranks, or 0 for a simulator without groups
    cache: bool = False

    def load(self) -> Simulator:
        """Return the simulator, without importing the modules of the others."""
        if self.group:
            return _group(self.group)
        if self.cache:
            return _cache()
        return _bare() if self.bare else _nodes()


def _nodes() -> Simulator:
    from kvflow.proof.sim.plants import PLANTS
    from kvflow.proof.sim.run import simulate

    faults = (*KINDS, *ON_COPIES, SWITCH)
    return Simulator("nodes", "", simulate, PLANTS, TABLES_OF_NODES, faults, 2_000)


def _bare() -> Simulator:
    from kvflow.proof.bare.plants import PLANTS
    from kvflow.proof.bare.run import simulate
    from kvflow.proof.sim.plants import PLANTS as OF_NODES

    hidden = [plant for plant in OF_NODES if plant.unseen]
    return Simulator("bare", " --bare", simulate, PLANTS, TABLES, KINDS, 20_000, hidden)


def _group(ranks: int) -> Simulator:
    from kvflow.proof.group.plants import PLANTS
    from kvflow.proof.group.run import simulate

    play = partial(simulate, ranks=ranks)
    return Simulator("group", f" --group {ranks}", play, PLANTS, TABLES_OF_GROUPS, KINDS, 20_000)


def _cache() -> Simulator:
    from kvflow.proof.cached.plants import PLANTS
    from kvflow.proof.cached.run import simulate

    faults = (*KINDS, *ON_COPIES)
    return Simulator("cache", " --cache", simulate, PLANTS, TABLES_OF_CACHES, faults, 2_000)
