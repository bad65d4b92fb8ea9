"""Fire, by hand: `python -m tests.hostile COMMAND --help`.

Each prints one JSON object; status 1: a promise broke.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys

import uvloop

from tests.forked_roles import Nursery, forking

COMMANDS = ("wire", "lies", "http", "strays", "endings", "errors", "storm")


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"tests.hostile.{name}")
        command = commands.add_parser(
            name, help=(module.__doc__ or "").split("\n\n")[0].split(":")[0]
        )
        for parameter in inspect.signature(module.run).parameters.values():
            command.add_argument(
                f"--{parameter.name}", type=type(parameter.default), default=parameter.default
            )
    given = vars(parser.parse_args())
    module = importlib.import_module(f"tests.hostile.{given.pop('command')}")
    nursery = Nursery()
    with forking(nursery):
        report = uvloop.run(module.run(**given))
    nursery.close()
    broken = module.faults(report)
    print(json.dumps({**report, "faults": broken}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
