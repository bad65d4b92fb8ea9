"""`kvflow plan`: the command line of the planner."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvflow.plan.profile import Profile, StepTimes, load_profile
from kvflow.plan.search import Limits, Plan, errors, search
from kvflow.plan.simulate import Figures, Sharing, Simulated, simulate
from kvflow.plan.trace import Trace, read_trace
from kvflow.protocols.errors import MisuseError
from kvflow.traces import BLOCK_TOKENS
from kvflow.usage import App

app = App(no_args_is_help=True)
TABLE_COLUMNS = 100  # width of tables in a file or a pipe


def _file(text: str) -> Any:
    return typer.Option(help=text, metavar="FILE", dir_okay=False, resolve_path=True)


@app.command()
def plan(
    trace: Annotated[Path, _file("Requests as JSON lines, as Mooncake publishes them.")],
    ttft: Annotated[float, typer.Option(help="Seconds to the first token.", min=1e-3)],
    itl: Annotated[float, typer.Option(help="Milliseconds between two tokens.", min=1e-3)],
    quantile: Annotated[
        float, typer.Option(help="Share of requests that must keep both.", min=0.01, max=1)
    ] = 0.95,
    profile: Annotated[Path | None, _file("Measured times to use, from --save.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure them now, on one prefill and one decode.")
    ] = False,
    save: Annotated[Path | None, _file("Save what was measured.")] = None,
    requests: Annotated[int, typer.Option(help="Requests of the trace; 0 = all.", min=0)] = 0,
    shrink: Annotated[
        int, typer.Option(help="Divide all lengths, so that a small machine can play.", min=1)
    ] = 1,
    speed: Annotated[float, typer.Option(help="Play so many times as fast.", min=1e-6)] = 1.0,
    block: Annotated[
        int, typer.Option(help="Tokens of a block of the trace.", min=1)
    ] = BLOCK_TOKENS,
    most: Annotated[int, typer.Option(help="Most workers of a role.", min=1, max=1024)] = 64,
    check: Annotated[
        str,
        typer.Option(
            help="Also play the trace on a real fleet of so many prefills and decodes.",
            metavar="P,D",
        ),
    ] = "",
    check_s: Annotated[
        float, typer.Option(help="Seconds that the real run may take.", min=1)
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="After --: flags of `kvflow up`, for real fleets.", metavar="FLAGS"),
    ] = None,
) -> None:
    """Find how many prefills and decodes a trace needs, from measured step times.

    The exit status is 1 if no fleet keeps the limits.
    """
    if (profile is None) is not measure:
        raise MisuseError("give either --measure or --profile FILE")
    shape = _shape(check)
    found = read_trace(trace, limit=requests, shrink=shrink, speed=speed, block_tokens=block)
    times = _times(profile, save, flags or [])
    fitting, left_out = _fitting(found, times)
    limits = Limits(ttft, itl / 1000, quantile)
    answer = search(fitting, StepTimes(times), times.sizes, limits, most)
    report = _report(times, fitting, left_out, limits, answer)
    if shape is not None:
        report["check"] = asyncio.run(_checked(fitting, times, shape, check_s, flags or []))
    if as_json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print(report)
    raise typer.Exit(0 if answer.best.keeps else 1)


def _times(profile: Path | None, save: Path | None, flags: list[str]) -> Profile:
    """Return the saved profile, or measure one, and save it if that is wanted."""
    if profile is not None:
        if save is not None:
            raise MisuseError("--save without --measure: nothing is measured; leave it out")
        return load_profile(profile)
    found = asyncio.run(_measured(flags))
    if save is not None:
        found.save(save)
    return found


def _shape(check: str) -> tuple[int, int] | None:
    if not check:
        return None
    try:
        prefills, decodes = map(int, check.split(","))
    except ValueError:
        prefills = decodes = 0
    if not (1 <= prefills <= 64 and 1 <= decodes <= 64):
        raise MisuseError(f"--check {check!r}: two numbers in 1..64 with a comma, such as 1,1")
    return prefills, decodes


def _say(text: str) -> None:
    sys.stderr.write(f"kvflow plan: {text}\n")


async def _measured(flags: list[str]) -> Profile:
    from kvflow.plan.fleet import Fleets  # it loads what starts servers
    from kvflow.plan.measure import measure

    fleets = Fleets(flags)
    async with fleets.started() as fleet:
        return await measure(fleet, fleets.settings.disaggregation_transfer_backend, _say)


def _fitting(trace: Trace, profile: Profile) -> tuple[Trace, int]:
    """Return the requests that a worker accepts, and how many it would refuse.

    Raises: MisuseError if there are none.
    """
    most = profile.sizes.max_model_len
    kept = [one for one in trace.requests if one.prompt_tokens + one.new_tokens <= most]
    if not kept:
        raise MisuseError(
            f"every request of the trace is longer than the {most} tokens of --max-model-len: the "
            f"longest has {trace.longest}; see --shrink"
        )
    return trace._replace(requests=kept), len(trace.requests) - len(kept)


async def _checked(
    trace: Trace, profile: Profile, shape: tuple[int, int], most_s: float, flags: list[str]
) -> dict[str, Any]:
    """Play the trace on a real fleet, beside the simulation of the same fleet."""
    from kvflow.plan.fleet import Fleets, play, slowed_by, warm_up  # it loads what starts servers

    async with Fleets(flags).started(*shape) as fleet:
        await warm_up(fleet)
        _say(f"playing {len(trace.requests)} requests on {shape[0]} prefills, {shape[1]} decodes")
        before = fleet.cpu_times()
        real = Figures(await play(fleet, trace, most_s))
        cpu = fleet.cpu_times(before)
        sizes = fleet.sizes
    times, found = StepTimes(profile), Simulated(real, 0, 0)
    # All of this fleet is on one machine, where the roles take time from each other.
    sharing = Sharing(profile.beside_decode, profile.beside_prefill)
    predicted = simulate(trace, times, sizes, *shape, sharing=sharing)
    # What other programs took is known only afterwards, so this is no prediction. It shows how much
    # of the error is theirs.
    factors = {
        role: slowed_by(cpu, role, workers)
        for role, workers in zip(("prefill", "decode"), shape, strict=True)
    }
    waiting = Sharing(**factors)
    slowed = simulate(trace, times, sizes, *shape, sharing=waiting)
    return {
        "prefills": shape[0],
        "decodes": shape[1],
        "cpu_s": sum(time.ran_s for time in cpu.values()),
        "waited_for_cpu_s": sum(time.waited_s for time in cpu.values()),
        "slowed_by": factors,
        "rows": [
            {
                "figure": name,
                "predicted": ours,
                "real": theirs,
                "error": _error(ours, theirs),
                "with_waiting": later,
                "error_with_waiting": _error(later, theirs),
            }
            for (name, ours, theirs), (_, later, _) in zip(
                errors(predicted, found), errors(slowed, found), strict=True
            )
        ],
    }


def _error(predicted: float, real: float) -> float:
    return (predicted - real) / real if real else 0.0


def _report(
    profile: Profile, trace: Trace, left_out: int, limits: Limits, answer: Plan
) -> dict[str, Any]:
    best = answer.best
    times = StepTimes(profile)
    return {
        "model": profile.model,
        "device": profile.device,
        "requests": len(trace.requests),
        "refused_as_too_long": left_out,
        "limits": {"ttft_s": limits.ttft_s, "itl_ms": limits.itl_s * 1e3, "of": limits.quantile},
        "prefill_tokens_s": {
            str(n): round(n / times.prefill_step_s([(n, 0)]))
            for n in (profile.sizes.chunk_tokens // 8, profile.sizes.chunk_tokens)
            if n
        },
        "decode_step_ms": {str(step.batch): step.seconds * 1e3 for step in profile.steps},
        "transfer_gb_s": profile.transfer_bytes_s / 1e9,
        "on_one_machine": {
            "prefill_beside_decode": profile.beside_decode,
            "decode_beside_prefill": profile.beside_prefill,
        },
        "keeps_limits": best.keeps,
        "more_workers_help": answer.more_help,
        "prefills": best.prefills,
        "decodes": best.decodes,
        "prefill_peak_tokens": best.found.prefill_peak_tokens,
        "decode_pool_tokens": best.found.decode_peak_tokens,
        "tried": [
            {
                "prefills": one.prefills,
                "decodes": one.decodes,
                "keeps": one.keeps,
                **_figures(one.found, limits),
            }
            for one in answer.tried
        ],
        "prefill_pools": [
            {"tokens": one.tokens, **_figures(one.found, limits)} for one in answer.pools
        ],
    }


def _figures(found: Simulated, limits: Limits) -> dict[str, float]:
    figures = found.figures
    return {
        "tokens_s": figures.tokens_s,
        "ttft_p50_s": figures.ttft_s(0.5),
        "ttft_s": figures.ttft_s(limits.quantile),
        "itl_ms": figures.itl_s(limits.quantile) * 1e3,
        "hit_rate": figures.hit_rate,
    }


def _print(report: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    limits = report["limits"]
    share = f"p{limits['of'] * 100:g}"
    table = Table(title=f"{report['requests']} requests, {report['refused_as_too_long']} too long")
    for name in ("prefills", "decodes", "tokens/s", "TTFT p50", f"TTFT {share}", f"ITL {share}"):
        table.add_column(name, justify="right")
    table.add_column("hit rate", justify="right")
    table.add_column("")
    for one in report["tried"]:
        table.add_row(
            str(one["prefills"]),
            str(one["decodes"]),
            *_cells(one),
            "keeps" if one["keeps"] else "misses",
        )
    console.print(table)
    pools = Table(title="hit rate by pool of each prefill, in tokens")
    for name in ("pool", "tokens/s", "TTFT p50", f"TTFT {share}", f"ITL {share}", "hit rate"):
        pools.add_column(name, justify="right")
    for one in report["prefill_pools"]:
        pools.add_row(str(one["tokens"]), *_cells(one))
    console.print(pools)
    if "check" in report:
        _print_check(console, report["check"])
    verdict = "are enough"
    if not report["keeps_limits"]:
        more = "were not tried" if report["more_workers_help"] else "do not help"
        verdict = f"are not enough, and more {more},"
    console.print(
        f"{report['prefills']} prefills and {report['decodes']} decodes {verdict} for TTFT "
        f"{limits['ttft_s']:g} s and ITL {limits['itl_ms']:g} ms of {share}; pools: at least "
        f"{report['prefill_peak_tokens']} tokens at prefill, {report['decode_pool_tokens']} at "
        "decode",
        highlight=False,
    )


def _cells(one: dict[str, float]) -> list[str]:
    return [
        f"{one['tokens_s']:.1f}",
        f"{one['ttft_p50_s'] * 1e3:.0f} ms",
        f"{one['ttft_s'] * 1e3:.0f} ms",
        f"{one['itl_ms']:.1f} ms",
        f"{one['hit_rate']:.1%}",
    ]


def _print_check(console: Console, check: dict[str, Any]) -> None:
    table = Table(title=f"real run: {check['prefills']} prefills, {check['decodes']} decodes")
    for name in ("", "real", "predicted", "error", "with waiting", "error"):
        table.add_column(name, justify="right")
    for row in check["rows"]:
        table.add_row(
            row["figure"],
            f"{row['real']:.4g}",
            f"{row['predicted']:.4g}",
            f"{row['error']:+.0%}",
            f"{row['with_waiting']:.4g}",
            f"{row['error_with_waiting']:+.0%}",
        )
    console.print(table)
    console.print(
        f"The fleet ran for {check['cpu_s']:.1f} s of CPU time, and waited "
        f'{check["waited_for_cpu_s"]:.1f} s for a CPU. "With waiting" is a simulation in which '
        f"prefill takes {check['slowed_by']['prefill']:.2f} and decode "
        f"{check['slowed_by']['decode']:.2f} times as long, as their model threads did.",
        highlight=False,
    )
