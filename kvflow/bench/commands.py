"""`kvflow bench ...`: the command line of the benchmarks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvflow.protocols.errors import MisuseError
from kvflow.usage import App


def _checkout(text: str) -> Any:
    return typer.Option(help=text, metavar="DIR", exists=True, file_okay=False, resolve_path=True)


app = App(help="Measure transfers and rooms, each figure beside a peer or a limit of the same run.")

Planes = Annotated[
    str,
    typer.Option(
        "--transfer-backend",
        help="Data planes, separated by commas.",
        metavar="local,mooncake,nixl",
    ),
]
Peer = Annotated[
    str,
    typer.Option(
        help="Folder of the SGLang harness to measure against, interleaved.", metavar="DIR"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Orders = Annotated[str, typer.Option(help="page_first, layer_first, or both with a comma.")]
Model = Annotated[
    str, typer.Option("--model-path", help="The model to serve; empty: the demo model.")
]
Clients = Annotated[str, typer.Option(help="Clients at once, separated by commas.", metavar="N,N")]
Threads = Annotated[int, typer.Option(help="Torch threads of every process.", min=1)]

TABLE_COLUMNS = 160  # width of tables in a file or a pipe
ALL_LOSSES = "killed prefill,silent prefill,killed decode,silent decode"


@app.command()
def transfer(
    planes: Planes = "local,mooncake",
    pairs: Annotated[int, typer.Option(help="Interleaved pairs of each case.", min=2)] = 10,
    order: Orders = "page_first",
    verify: Annotated[
        bool, typer.Option("--verify", help="What --verify-transfers costs, instead.")
    ] = False,
    tp: Annotated[
        str,
        typer.Option(
            help=(
                "Slices between a prefill and a decode of other widths, through staging or not, "
                "instead."
            ),
            metavar="2:1",
        ),
    ] = "",
    page_sizes: Annotated[
        str,
        typer.Option(
            help="Between pages of two sizes, beside equal sizes, instead.", metavar="16:64"
        ),
    ] = "",
    copy_threads: Annotated[
        int,
        typer.Option(
            "--copy-threads", help="Threads that copy over local; 0: the default, one.", min=0
        ),
    ] = 0,
    peer: Peer = "",
    as_json: AsJson = False,
) -> None:
    """Goodput through rooms, divided by the bare data plane on the same page lists (needs 9 GiB of
    memory).
    """
    from kvflow.bench.page_sizes import bench_page_sizes, sizes_of
    from kvflow.bench.slices import bench_slices, widths_of
    from kvflow.bench.transfer import bench_transfer

    if tp:
        _report(bench_slices(tuple(planes.split(",")), widths_of(tp), pairs, _say), as_json)
        return
    names, orders = tuple(planes.split(",")), tuple(order.split(","))
    if page_sizes:
        _report(bench_page_sizes(names, orders, sizes_of(page_sizes), pairs, _say), as_json)
        return
    work = bench_transfer(names, orders, pairs, peer or None, verify, _say, copy_threads)
    _report(work, as_json)


@app.command()
def rooms(
    planes: Planes = "local,mooncake",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 5,
    peer: Peer = "",
    open_rooms: Annotated[
        str,
        typer.Option(
            "--open",
            help=(
                "Measure so many rooms that stay open instead, on the first data plane, e.g. "
                "100,1000,10000,30000."
            ),
            metavar="N,N",
        ),
    ] = "",
    rest_s: Annotated[
        float, typer.Option("--rest", help="Seconds they are watched at rest.", min=0.5)
    ] = 5.0,
    links: Annotated[
        int, typer.Option(help="And over so many links; 1: not measured.", min=1)
    ] = 300,
    losses: Annotated[
        str, typer.Option(help="How peers are lost, separated by commas; empty: not at all.")
    ] = ALL_LOSSES,
    freeze: Annotated[
        bool, typer.Option(help="gc.freeze while rooms are opened, as the roles do.")
    ] = True,
    tree: Annotated[
        Path | None, _checkout("Over the library of this checkout, with --open.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rooms/s, latency, CPU per room and event-loop stall, at 1, 32 and 256 rooms at once.

    With --open: what N open rooms cost at rest, in links and collections, and when their peer is
    lost.
    """
    from kvflow.bench.growth import Growth, bench_growth
    from kvflow.bench.rooms import bench_rooms

    names = tuple(planes.split(","))
    if not open_rooms:
        return _report(bench_rooms(names, rounds, peer or None, _say), as_json)
    plan = Growth(
        names[0], rest_s, links, tuple(filter(None, losses.split(","))), freeze, str(tree or "")
    )
    return _report(bench_growth(_numbers("--open", open_rooms), plan, _say), as_json)


@app.command()
def abort(
    planes: Planes = "local,mooncake",
    times: Annotated[int, typer.Option(help="Aborts that count, on each data plane.", min=1)] = 200,
    pages: Annotated[int, typer.Option(help="Pages of 2 MiB in each room.", min=8)] = 256,
    seed: Annotated[int, typer.Option(help="Where in the transfers the aborts come.")] = 3,
    peer: Peer = "",
    as_json: AsJson = False,
) -> None:
    """Aborts in mid-transfer: time until the pages are free, and foreign bytes in their next
    owner's hands.

    Needs 5 GiB of memory at 256 pages.
    """
    from kvflow.bench.abort import bench_abort

    _report(bench_abort(tuple(planes.split(",")), times, pages, seed, peer or None, _say), as_json)


@app.command()
def group(
    ranks: Annotated[
        str, typer.Option(help="Sizes of the group, separated by commas.", metavar="N,N")
    ] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each size.", min=1)] = 5,
    requests: Annotated[int, typer.Option(help="Requests of each round.", min=1)] = 2_000,
    as_json: AsJson = False,
) -> None:
    """What it costs that prefill ranks agree: decisions/s, CPU per room, growth per rank,
    event-loop stall.

    Beside the same frames over bare ZeroMQ sockets; rooms wait for nothing but the group.
    """
    from kvflow.bench.group import bench_group

    _report(bench_group(_numbers("--ranks", ranks), rounds, requests, _say), as_json)


@app.command()
def compare(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A bench and its options, after two dashes: -- abort --times 50.",
            metavar="-- WHAT",
        ),
    ],
    tree: Annotated[
        list[str],
        typer.Option(help="Root of a checkout; the first is what ratios are to.", metavar="DIR"),
    ],
    planes: Planes = "local,mooncake",
    turns: Annotated[
        int, typer.Option(help="Interleaved turns: every tree once, the first twice.", min=1)
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """The same measurement of several checkouts, interleaved, beside the first one's ratio to
    itself.

    Options must be known to every tree; `-- rooms --open N` is measured by the bench of this tree
    in all of them.
    """
    from kvflow.bench.compare import bench_compare, printed

    names = tuple(planes.split(","))
    report = asyncio.run(bench_compare(tree, names, what, turns, _say))
    _table(report, as_json, printed)


@app.command()
def guards(
    planes: Planes = "local,mooncake",
    turns: Annotated[
        int, typer.Option(help="Interleaved turns: every variant once, plain twice.", min=1)
    ] = 12,
    as_json: AsJson = False,
) -> None:
    """What a control key (CURVE) and --verify-transfers cost: rooms/s and goodput with and without,
    interleaved.

    Needs 12 GiB of memory.
    """
    from kvflow.bench.compare import printed
    from kvflow.bench.guards import bench_guards

    _table(asyncio.run(bench_guards(tuple(planes.split(",")), turns, _say)), as_json, printed)


@app.command()
def serve(
    model: Model = "",
    api: Annotated[
        str, typer.Option(help="The streaming API: completions (OpenAI's) or generate.")
    ] = "completions",
    clients: Clients = "1,16",
    new_tokens: Annotated[int, typer.Option(help="Tokens of each completion.", min=2)] = 256,
    turns: Annotated[int, typer.Option(help="Interleaved turns of each case.", min=1)] = 5,
    threads: Threads = 1,
    streams: Annotated[
        int, typer.Option(help="Streams at once beside which GETs are timed; 0: none.", min=0)
    ] = 256,
    tree: Annotated[
        list[Path] | None, _checkout("Also the server of this checkout, in the same turns.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens/s of `kvflow up`, streamed through its router, divided by stock transformers'
    `generate`.
    """
    from kvflow.bench.serve import ServePlan, bench_serve

    plan = ServePlan(
        model,
        api,
        _numbers("--clients", clients),
        new_tokens,
        turns,
        threads,
        streams,
        trees=tuple(map(str, tree or ())),
    )
    _report(bench_serve(plan, _say), as_json)


@app.command()
def viewers(
    viewers: Annotated[int, typer.Option(help="Viewers of the live page.", min=1)] = 5,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    requests: Annotated[int, typer.Option(help="Requests of each side of a turn.", min=1)] = 300,
    turns: Annotated[int, typer.Option(help="Interleaved turns.", min=1)] = 10,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Requests/s of `kvflow up` beside viewers of the router's live page, divided by those without
    viewers.
    """
    from kvflow.bench.viewers import bench_viewers

    _report(bench_viewers(viewers, clients, requests, turns, threads, _say), as_json)


@app.command()
def grammars(
    model: Model = "",
    clients: Clients = "1,16",
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0)] = 0.0,
    turns: Annotated[int, typer.Option(help="Interleaved turns of each case.", min=1)] = 7,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Time per token of `kvflow up`, streamed through its router, of answers that match a JSON
    schema or a regular expression, divided by that of free answers.
    """
    from kvflow.bench.grammars import bench_grammars

    numbers = _numbers("--clients", clients)
    work = bench_grammars(numbers, new_tokens, temperature, turns, threads, _say, model)
    _report(work, as_json)


@app.command()
def cache(
    trace: Annotated[
        str,
        typer.Option(
            help="conversation, synthetic (Mooncake's, in --traces), or a file like them."
        ),
    ] = "conversation",
    traces: Annotated[
        Path | None,
        typer.Option(
            help="Where NAME_trace.jsonl lie.",
            metavar="DIR",
            envvar="KVFLOW_TRACES",
            file_okay=False,
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Only the first of the trace; 0: all.", min=0)] = 0,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a page.", min=1)] = 64,
    capacity: Annotated[
        int, typer.Option("--capacity-tokens", help="Tokens the cache holds.", min=1)
    ] = 3_000_000,
    events: Annotated[
        bool, typer.Option("--events", help="Record KV events, and encode them after each request.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 3,
    curve: Annotated[
        bool,
        typer.Option(
            "--capacity-curve",
            help="Hit rate at 0.1M to 50M tokens instead, beside Mooncake's paper.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw that curve here, as SVG.", metavar="FILE", dir_okay=False),
    ] = None,
    peer: Annotated[
        str,
        typer.Option(
            help="Folder of the harness of SGLang's compiled tree, interleaved.", metavar="DIR"
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """The prefix index on a trace of prompts: CPU us per request (match, lock, evict, insert) and
    hit rate.

    And of one eviction among 50,000 leaves, and of one match of 131,072 tokens at depth 1,024.
    """
    from kvflow.bench.cache import CachePlan, bench_cache
    from kvflow.bench.cache_curve import capacity_curve, printed
    from kvflow.bench.cache_trace import find_trace, read_trace

    if plot is not None and not curve:
        raise MisuseError("--plot draws the curve of --capacity-curve, which is not asked for")
    prompts = read_trace(find_trace(trace, traces), requests)
    if curve:
        return _table(asyncio.run(capacity_curve(trace, prompts, plot, _say)), as_json, printed)
    plan = CachePlan(page_size, capacity, events, rounds, peer or None)
    return _report(bench_cache(prompts, plan, _say), as_json)


@app.command()
def stalls(
    rounds: Annotated[
        int, typer.Option(help="Rounds over all cases; the worst one counts.", min=1)
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """How long both roles' event loops stand still under the largest legal requests, beside an idle
    ticker.

    Answers of 4,000 tokens with top-20 log-probabilities or 64 stop strings, a prompt of 131,072
    tokens, the largest Bootstrap, 8 MiB of text.
    """
    from kvflow.bench.stalls import bench_stalls

    _report(bench_stalls(rounds, _say), as_json)


@app.command()
def peers(
    peers: Annotated[int, typer.Option(help="Emulated decodes.", min=10, max=9_000)] = 1_000,
    rooms: Annotated[int, typer.Option(help="Rooms of one page.", min=1)] = 5_000,
    rest_s: Annotated[
        float, typer.Option("--rest", help="Seconds they are watched at rest.", min=0.5)
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Stalls, CPU, memory and tables of one prefill node beside a crowd of decodes, which register,
    rest, move rooms, vanish, come back and say goodbye.
    """
    from kvflow.bench.peers import bench_peers

    _report(bench_peers(peers, rooms, rest_s, _say), as_json)


@app.command()
def offload(
    pages: Annotated[int, typer.Option(help="Scattered pages of 2 MiB.", min=1)] = 512,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.", min=1)] = 10,
    order: Orders = "page_first",
    batch: Annotated[
        int,
        typer.Option(
            help="Sequences that the demo model decodes beside the copies; 0 = no steps.", min=0
        ),
    ] = 8,
    device: Annotated[
        str, typer.Option(help="Where pool and model are: cpu, cuda or cuda:N.")
    ] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Snapshots: GB/s of copy-out and restore, divided by one large memcpy of the same run.

    And the time of decode steps beside them, divided by that of steps alone. Needs 4 GiB of memory
    at 512 pages.
    """
    from kvflow.bench.offload import OffloadPlan, bench_offload
    from kvflow.memory.past_caches import copying_environment

    environment = copying_environment(os.environ)
    # glibc reads its tunables before the program starts, so a new program replaces this one.
    if environment != dict(os.environ):
        os.execve(sys.executable, sys.orig_argv, environment)
    if device != "cpu":
        from kvflow.serve.engine.model.device import find_device

        device = str(find_device(device))
    where = None if device == "cpu" else device
    plan = OffloadPlan(pages, rounds, tuple(order.split(",")), batch, device=where)
    _report(bench_offload(plan, _say), as_json)


@app.command()
def overcommit(
    share: Annotated[
        float,
        typer.Option(help="Share of the pages needed at worst that pools have.", min=0.05, max=1),
    ] = 0.4,
    ratio: Annotated[
        float, typer.Option(help="--new-token-ratio of the over-committed one.", min=0, max=1)
    ] = 0.3,
    requests: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each request, at most.", min=2)] = 200,
    host_bytes: Annotated[int, typer.Option(help="Host memory for retracted requests.", min=0)] = 1
    << 28,
    turns: Annotated[int, typer.Option(help="Interleaved turns of each load.", min=1)] = 5,
    threads: Threads = 1,
    fixed_cost: Annotated[
        bool,
        typer.Option(
            "--fixed-cost",
            help=(
                "Serve a deep, narrow random model, whose steps cost about the same for any batch "
                "as on accelerators."
            ),
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Requests/s of `kvflow up` with a pool that is too small, over-committed, divided by those in
    safe mode.

    And the bound: those of a pool that is never full, divided by the same.
    """
    from kvflow.bench.overcommit import OvercommitPlan, bench_overcommit

    plan = OvercommitPlan(
        requests, new_tokens, share, ratio, host_bytes, turns, threads, fixed_cost
    )
    _report(bench_overcommit(plan, _say), as_json)


@app.command()
def local(
    requests: Annotated[int, typer.Option(help="Requests of each turn.", min=10)] = 120,
    rate: Annotated[float, typer.Option(help="Requests per second.", min=0.1)] = 12.0,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 40,
    tokens: Annotated[int, typer.Option(help="--local-prefill-tokens.", min=1)] = 256,
    chunk: Annotated[int, typer.Option(help="--local-prefill-chunk of the decodes.", min=1)] = 128,
    workers: Annotated[int, typer.Option(help="Prefills, and as many decodes.", min=1)] = 2,
    turns: Annotated[int, typer.Option(help="Interleaved turns.", min=1)] = 5,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """First tokens and gaps of a mix of prompts, where decode computes some of them itself, beside
    pairs alone.
    """
    from kvflow.bench.local import LocalPlan, bench_local

    plan = LocalPlan(requests, rate, new_tokens, tokens, chunk, workers, turns, threads)
    _report(bench_local(plan, _say), as_json)


@app.command()
def profile(
    tree: Annotated[list[Path], _checkout("Root of a checkout.")],
    plane: Annotated[str, typer.Option("--transfer-backend", help="Data plane.")] = "local",
    at_once: Annotated[int, typer.Option(help="Rooms at once.", min=1)] = 256,
    as_json: AsJson = False,
) -> None:
    """Calls and CPU of one room on each side, function by function, in each checkout."""
    from kvflow.bench.profile import bench_profile

    _report(bench_profile([str(one) for one in tree], plane, at_once, _say), as_json)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the numbers in a comma-separated list. Raises: MisuseError for any other text."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise MisuseError(
            f"{option} {text!r} is not a list of numbers of at least 1, separated by commas"
        )
    return tuple(map(int, words))


def _say(text: str) -> None:
    Console(stderr=True, highlight=False).print(text)


def _table(report: dict[str, Any], as_json: bool, printed: Callable[[Any], Table]) -> None:
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS).print(
            printed(report["table"])
        )


def _report(work: Coroutine[Any, Any, dict[str, Any]], as_json: bool) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = asyncio.run(work)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        Console().print_json(data=report)
