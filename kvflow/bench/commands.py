"""`kvflow bench ...`: the command line of the benchmarks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    help="Measure transfers and rooms, each figure beside a peer or a limit of the same run.", no_args_is_help=True
)

Planes = Annotated[
    str, typer.Option("--transfer-backend", help="Data planes, separated by commas.", metavar="local,mooncake")
]
Peer = Annotated[str, typer.Option(help="Folder of the SGLang harness to measure against, interleaved.", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def transfer(
    planes: Planes = "local,mooncake",
    pairs: Annotated[int, typer.Option(help="Interleaved pairs of each case.", min=2)] = 10,
    order: Annotated[str, typer.Option(help="page_first, layer_first, or both with a comma.")] = "page_first",
    verify: Annotated[bool, typer.Option("--verify", help="What --verify-transfers costs, instead.")] = False,
    peer: Peer = "",
    as_json: AsJson = False,
) -> None:
    """Goodput through rooms, divided by the bare data plane on the same page lists (needs 9 GiB of memory)."""
    from kvflow.bench.transfer import bench_transfer

    names, orders = tuple(planes.split(",")), tuple(order.split(","))
    _report(bench_transfer(names, orders, pairs, peer or None, verify, _say), as_json)


@app.command()
def rooms(
    planes: Planes = "local,mooncake",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 5,
    peer: Peer = "",
    as_json: AsJson = False,
) -> None:
    """Rooms/s, latency, CPU per room and event-loop stall, at 1, 32 and 256 rooms at once."""
    from kvflow.bench.rooms import bench_rooms

    _report(bench_rooms(tuple(planes.split(",")), rounds, peer or None, _say), as_json)


@app.command()
def abort(
    planes: Planes = "local,mooncake",
    times: Annotated[int, typer.Option(help="Aborts that count, on each data plane.", min=1)] = 200,
    pages: Annotated[int, typer.Option(help="Pages of 2 MiB in each room.", min=8)] = 256,
    seed: Annotated[int, typer.Option(help="Where in the transfers the aborts come.")] = 3,
    peer: Peer = "",
    as_json: AsJson = False,
) -> None:
    """Aborts in mid-transfer: time until the pages are free, and foreign bytes in their next owner's hands.

    Needs 5 GiB of memory at 256 pages.
    """
    from kvflow.bench.abort import bench_abort

    _report(bench_abort(tuple(planes.split(",")), times, pages, seed, peer or None, _say), as_json)


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text)


def _report(work: Coroutine[Any, Any, dict[str, Any]], as_json: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = asyncio.run(work)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print_json(data=report)
