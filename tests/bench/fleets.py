"""The servers of benches with forked roles: a command of its own imports torch in each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvflow.bench.serve import Server
from kvflow.serve.config.sources import resolve
from kvflow.serve.launch.supervisor import Fleet


@asynccontextmanager
async def serving(
    model: str, threads: int, tree: str = "", arguments: tuple[str, ...] = ()
) -> AsyncIterator[Server]:
    """Stand for `kvflow.bench.serve.serving` where a test has the fixture `forked_roles`."""
    assert (threads, tree) == (1, "")
    given = {"model_path": model, "port": 0, "prefix_cache": "off", "log_level": "warning"}
    for argument in arguments:
        flag, value = argument.removeprefix("--").split("=")
        given[flag.replace("-", "_")] = value
    async with Fleet(resolve("up", given, env={}), given, quiet=True) as fleet:
        yield Server(
            {child.role: child.url for child in fleet.children},
            {child.role: child.process.pid for child in fleet.children},
        )
