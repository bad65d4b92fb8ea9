"""`kvflow sim`: play seeds of any simulator, trace one run, hunt planted bugs, and run the
exhaustive walk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvflow.proof.sim.report import described, simulate_many
from kvflow.proof.simulators import Choice, Simulator
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.limits import Bounds
from kvflow.usage import App

app = App(
    help=(
        "Play the real handlers in virtual time, with faults, and check what must hold at every "
        "step."
    ),
    no_args_is_help=False,
)


GroupRanks = Annotated[
    int,
    typer.Option(
        help="One group of so many prefill ranks, endpoints alone.",
        min=0,
        max=Bounds().ranks_per_room,
        metavar="RANKS",
    ),
]
FleetNodes = Annotated[
    int,
    typer.Option(
        help=(
            "An hour of so many prefills and as many decodes, endpoints alone: a rack is lost, all "
            "restart, the network parts."
        ),
        min=0,
        metavar="NODES",
    ),
]
FleetRooms = Annotated[
    int, typer.Option(help="With --fleet: rooms in that hour; 0: 200 per decode.", min=0)
]


@app.callback(invoke_without_command=True)
def sim(
    seeds: Annotated[str, typer.Option(help="Play these seeds.", metavar="FIRST:END")] = "",
    seed: Annotated[int | None, typer.Option(help="Play one seed.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Tell the story of that seed, line by line.")
    ] = False,
    plant: Annotated[
        str, typer.Option(help="With this planted bug, or 'all': hunt it and print the first seed.")
    ] = "",
    plants: Annotated[bool, typer.Option("--plants", help="List the planted bugs.")] = False,
    exhaust: Annotated[
        bool,
        typer.Option(
            "--exhaust",
            help="Walk everything two rooms and their link, a few ranks, or a cache can do.",
        ),
    ] = False,
    bounds: Annotated[
        str,
        typer.Option(
            help=(
                "With --exhaust: small, wide, group, cache, full, or one world; 'list' prints them."
            )
        ),
    ] = "",
    bare: Annotated[
        bool, typer.Option("--bare", help="Endpoints alone: no event loop, more seeds a second.")
    ] = False,
    group: GroupRanks = 0,
    cache: Annotated[
        bool, typer.Option("--cache", help="Whole nodes with prefix caches, whose tiers fail.")
    ] = False,
    fleet: FleetNodes = 0,
    rooms: FleetRooms = 0,
    jobs: Annotated[int, typer.Option(help="Processes that share the seeds.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Exit status 1 when an invariant broke, or a plant was not found."""
    kinds = {"--bare": bare, "--group": bool(group), "--cache": cache, "--fleet": bool(fleet)}
    _check_choices(kinds, {"--seeds": bool(seeds), "--seed": seed is not None}, exhaust, bounds)
    if fleet:
        _check_fleet({"--seeds": seeds, "--trace": trace, "--plant": plant, "--plants": plants})
        return _fleet(fleet, rooms, seed or 0, as_json)
    if rooms:
        raise MisuseError("--rooms is of --fleet, which is not given")
    if exhaust and not plants:
        return _exhaust(bounds, plant, as_json)
    choice = Choice(bare, group, cache)
    if plants:
        return _list_plants(choice.load(), as_json)
    if seed is not None:
        return _one(choice.load(), seed, plant, trace, as_json)
    if plant:
        return _hunt(choice.load(), plant, seeds, as_json)
    return _report(simulate_many(_range(seeds or "0:1000"), jobs, say=_say, choice=choice), as_json)


def _check_choices(
    kinds: dict[str, bool], seeds: dict[str, bool], exhaust: bool, bounds: str
) -> None:
    """Refuse options that exclude each other. Raises: MisuseError."""
    if (chosen := sum(kinds.values())) > 1:
        raise MisuseError(f"{chosen} of {', '.join(kinds)} are given: choose one")
    if bounds and not exhaust:
        raise MisuseError(f"--bounds {bounds} is of --exhaust, which is not given")
    if exhaust and (given := [name for name, value in (kinds | seeds).items() if value]):
        raise MisuseError(f"{given[0]} is of seeds, and --exhaust plays none: leave one out")


def _check_fleet(others: dict[str, object]) -> None:
    """Refuse options that have no meaning for one run of a fleet. Raises: MisuseError."""
    if given := [name for name, value in others.items() if value]:
        raise MisuseError(f"--fleet plays one run, of --seed: leave {given[0]} out")


def _fleet(nodes: int, rooms: int, seed: int, as_json: bool) -> None:
    from kvflow.proof.fleet.plan import plan_of
    from kvflow.proof.fleet.run import simulate_fleet

    _report(simulate_fleet(plan_of(nodes, rooms or 200 * nodes), seed, _say), as_json)


def _exhaust(bounds: str, plant: str, as_json: bool) -> None:
    from kvflow.proof.walk import run

    if bounds == "list":
        return _list_worlds(run.ALL_SETS, run.TEXTS, as_json)
    return _report(run.run(bounds, plant, _say), as_json)


def _one(simulator: Simulator, seed: int, plant: str, trace: bool, as_json: bool) -> None:
    def tell(at_s: float, who: str, what: str) -> None:
        typer.echo(f"{at_s:9.4f}  {who:<12} {what}", err=as_json)

    with simulator.planted(plant):
        outcome = simulator.simulate(seed, tell=tell if trace else None)
    report: dict[str, Any] = {
        "seed": seed,
        "violations": 0,
        "faults": dict(outcome.faults),
        "steps": outcome.steps,
    }
    if outcome.violation is not None:
        report |= {"violations": 1, **described(outcome, simulator.how, plant)}
    _report(report, as_json)


def _hunt(simulator: Simulator, plant: str, seeds: str, as_json: bool) -> None:
    names = [p.name for p in simulator.plants] if plant == "all" else [plant]
    within = _range(seeds or f"0:{simulator.finds_within}")
    found = [simulator.hunt(name, within, _say) for name in names]
    missed = sum("seed" not in one for one in found)
    columns = ("plant", "found by", "invariant", "what the run says")
    rows = [
        [one["plant"], str(one.get("seed", "NOT FOUND"))]
        + [one.get(key, "") for key in ("invariant", "text")]
        for one in found
    ]
    _print({"plants": len(found), "not_found": missed, "found": found}, columns, rows, as_json)
    if missed:
        raise typer.Exit(1)


def _list_plants(simulator: Simulator, as_json: bool) -> None:
    listed = [
        {"name": p.name, "text": p.text, "invariant": p.found[simulator.key][1]}
        for p in simulator.plants
    ]
    rows = [(one["name"], one["invariant"], one["text"]) for one in listed]
    _print(listed, ("plant", "breaks", "what it is"), rows, as_json)


def _list_worlds(
    sets: Mapping[str, Sequence[str]], texts: Mapping[str, str], as_json: bool
) -> None:
    rows = [
        (name, ", ".join(found for found, names in sets.items() if name in names), text)
        for name, text in texts.items()
    ]
    _print({"sets": sets, "worlds": texts}, ("world", "in", "what it asks"), rows, as_json)


def _print(
    data: object, columns: Sequence[str], rows: Iterable[Sequence[str]], as_json: bool
) -> None:
    if as_json:
        typer.echo(json.dumps(data))
        return
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _range(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        found = range(int(first), int(end)) if colon else range(int(first))
    except ValueError:
        raise MisuseError(f"--seeds {text!r} is not FIRST:END") from None
    if not found:
        raise MisuseError(f"--seeds {text!r} names no seed")
    return found


def _say(text: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def _report(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print_json(data=report)
    if report.get("violations"):
        raise typer.Exit(1)
