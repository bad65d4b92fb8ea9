"""Run a worker from this tree's bench over the library in another checkout.

    PYTHONPATH=CHECKOUT python -P kvflow/bench/elsewhere.py MODULE prefill|decode

MODULE is a worker, such as `kvflow.bench.growth_worker`. Only `kvflow.bench` comes from this tree.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from kvflow import bench


def worker_command(tree: str, module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run `module` over the library in `tree`."""
    env = {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1"}
    return [sys.executable, "-P", str(Path(__file__).resolve()), module], env


def _main() -> None:
    # The checkout has a `kvflow.bench` too, but submodules must come from the folder of this file.
    bench.__path__[:] = [os.path.dirname(os.path.abspath(__file__))]
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
