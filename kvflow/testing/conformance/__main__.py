"""The command line of the suite: see the package."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

import msgspec

from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.testing.conformance import CHECKS, Bench, Check, NotRunError

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 when no check has failed, 1 when one has, 2 for a plane that does not exist."""
    names = ", ".join(check.name for check in CHECKS)
    parser = argparse.ArgumentParser(prog="python -m kvflow.testing.conformance", description="Prove a data plane.")
    parser.add_argument("--plane", action="append", required=True, help="a name, or module:factory; may be repeated")
    parser.add_argument("--rooms", type=int, default=1000, help="rooms over all endings (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of pages and rooms (default: a random one)")
    parser.add_argument("--only", action="append", metavar="CHECK", help=f"one of: {names}; may be repeated")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    told = parser.parse_args(arguments)
    seed = told.seed if told.seed is not None else random.SystemRandom().randrange(1 << 32)
    if unknown := set(told.only or ()) - {check.name for check in CHECKS}:
        parser.error(f"--only {sorted(unknown)[0]!r}: there are {names}")
    chosen = [check for check in CHECKS if not told.only or check.name in told.only]
    reports: dict[str, dict[str, Any]] = {}
    for plane in told.plane:
        if not told.json:
            _say(f"{plane} (seed {seed})")
        try:
            reports[plane] = asyncio.run(prove(plane, chosen, seed, told.rooms, quiet=told.json))
        except MisuseError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    if told.json:
        _say(msgspec.json.encode({"seed": seed, "planes": reports}).decode())
    return int(any(found["how"] == FAILED for report in reports.values() for found in report.values()))


async def prove(plane: str, checks: list[Check], seed: int, rooms: int, *, quiet: bool) -> dict[str, dict[str, Any]]:
    """Run the checks one after the other; {check: {"how", "told", "seconds"}}. Raises: MisuseError (no such plane)."""
    unavailable = Bench(plane).adapter.unavailable_reason()
    report: dict[str, dict[str, Any]] = {}
    for check in checks:
        began = time.monotonic()
        how, text = (NOT_RUN, unavailable) if unavailable else await _run(check, Bench(plane, seed, rooms))
        report[check.name] = {"how": how, "told": text, "seconds": round(time.monotonic() - began, 2)}
        if not quiet:
            _say(f"  {how:<8} {check.name}: {text}".replace("\n", "\n           "))
    return report


async def _run(check: Check, bench: Bench) -> tuple[str, str]:
    try:
        return OK, await check.run(bench)
    except NotRunError as error:
        return NOT_RUN, str(error)
    except (AssertionError, KvflowError, TimeoutError, OSError) as error:
        return FAILED, f"{type(error).__name__}: {error}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
