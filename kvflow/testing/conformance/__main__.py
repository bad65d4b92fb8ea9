"""The command line of the conformance suite; see the package for examples."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from typing import Any

import msgspec

from kvflow.protocols.errors import MisuseError
from kvflow.testing.conformance import CHECKS, Bench, Check, NotRunError

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; return 0 if no check failed, 1 if one failed, and 2 for an unknown plane."""
    names = ", ".join(check.name for check in CHECKS)
    parser = argparse.ArgumentParser(
        prog="python -m kvflow.testing.conformance", description="Prove a data plane."
    )
    parser.add_argument(
        "--plane", action="append", required=True, help="a name, or module:factory; may be repeated"
    )
    parser.add_argument(
        "--rooms", type=_rooms, default=1000, help="rooms over all endings (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="of pages and rooms (default: a random one)"
    )
    parser.add_argument(
        "--only", action="append", metavar="CHECK", help=f"one of: {names}; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    if unknown := set(given.only or ()) - {check.name for check in CHECKS}:
        parser.error(f"--only {sorted(unknown)[0]!r}: there are {names}")
    chosen = [check for check in CHECKS if not given.only or check.name in given.only]
    reports: dict[str, dict[str, Any]] = {}
    for plane in given.plane:
        if not given.json:
            _say(f"{plane} (seed {seed})")
        try:
            reports[plane] = asyncio.run(prove(plane, chosen, seed, given.rooms, quiet=given.json))
        except MisuseError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    if given.json:
        _say(msgspec.json.encode({"seed": seed, "planes": reports}).decode())
    return int(
        any(found["status"] == FAILED for report in reports.values() for found in report.values())
    )


async def prove(
    plane: str, checks: list[Check], seed: int, rooms: int, *, quiet: bool
) -> dict[str, dict[str, Any]]:
    """Run the checks one after the other; return the status, detail and seconds of each by name.

    Raises: MisuseError for an unknown plane.
    """
    unavailable = Bench(plane).adapter.unavailable_reason()
    report: dict[str, dict[str, Any]] = {}
    for check in checks:
        began = time.monotonic()
        status, detail = (
            (NOT_RUN, unavailable) if unavailable else await _run(check, Bench(plane, seed, rooms))
        )
        seconds = round(time.monotonic() - began, 2)
        report[check.name] = {"status": status, "detail": detail, "seconds": seconds}
        if not quiet:
            _say(f"  {status:<8} {check.name}: {detail}".replace("\n", "\n           "))
    return report


async def _run(check: Check, bench: Bench) -> tuple[str, str]:
    try:
        return OK, await check.run(bench)
    except NotRunError as error:
        return NOT_RUN, str(error)
    except Exception as error:  # noqa: BLE001
        # A plane may raise any exception. The other checks must still run.
        return FAILED, f"{type(error).__name__}: {error}"


def _rooms(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rooms, 1 at least")
    return int(text)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
