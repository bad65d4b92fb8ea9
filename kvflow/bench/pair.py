"""Two worker processes, prefill and decode, and a driver that sends the same commands to both."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any, Self

from kvflow.bench.figures import Row

START_DELAY_S = 0.1
WORKER = "kvflow.bench.worker"


def checkout_env(tree: str) -> dict[str, str]:
    """Return environment variables that make Python import kvflow from `tree`, if it is given."""
    if not tree:
        return {}
    return {"PYTHONPATH": tree, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}


class Closed:
    """Base class of objects that `async with` closes."""

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Process(Closed):
    """A child that answers JSON lines with JSON lines."""

    def __init__(self, child: asyncio.subprocess.Process, name: str) -> None:
        self._child, self.name = child, name

    @classmethod
    async def spawn(cls, *argv: str, name: str, env: dict[str, str] | None = None) -> Process:
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A reply is a single line, which may be far longer than the default limit of 64 KiB.
            limit=1 << 26,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        return cls(child, name)

    @classmethod
    async def run_module(cls, module: str, *argv: str, name: str = "", tree: str = "") -> Process:
        """Run a module from this checkout, or from `tree`.

        By default, the name of the process is the last argument.
        """
        command = (sys.executable, "-P", "-m", module, *argv)
        return await cls.spawn(*command, name=name or command[-1], env=checkout_env(tree))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one command, and return the reply. Raises: RuntimeError with the child's error."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        await self._child.stdin.drain()
        line = await self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {await self._child.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name}: {reply['error']}")
        return reply

    def freeze(self) -> None:
        """Suspend the process, so that it is silent but not dead."""
        self._child.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """End the process at once, frozen or not."""
        self._child.kill()
        await self._child.wait()

    async def close(self) -> None:
        if self._child.returncode is None and self._child.stdin is not None:
            self._child.stdin.write(b'{"do": "quit"}\n')
            self._child.stdin.close()
            try:
                await asyncio.wait_for(self._child.wait(), 20)
            except TimeoutError:
                self._child.kill()
                await self._child.wait()


class WorkerPair(Closed):
    """A prefill and a decode worker of kvflow, on one data plane and one pool shape."""

    def __init__(self, prefill: Process, decode: Process, page_bytes: int) -> None:
        self.prefill, self.decode, self.page_bytes = prefill, decode, page_bytes
        self._next_room = 1

    @classmethod
    async def open(
        cls, plane: str, module: str = WORKER, tree: str = "", /, **shape: Any
    ) -> WorkerPair:
        """Start both workers and set them up.

        Each process runs `module` with its role as the argument, over the checkout `tree` if it is
        given. `shape` has layers, heads, dim, page_size, pages and order.
        """
        prefill, decode = [
            await Process.run_module(module, role, tree=tree) for role in ("prefill", "decode")
        ]
        ready = await prefill.ask("setup", plane=plane, ranks=[], **shape)
        await decode.ask("setup", plane=plane, ranks=ready["ranks"], **shape)
        return cls(prefill, decode, ready["page_bytes"])

    async def rooms(
        self, count: int, concurrency: int, pages: int, *, ticking: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run `count` rooms of `pages` pages, and return the figures of prefill and of decode."""
        first, self._next_room = self._next_room, self._next_room + count
        size = {"count": count, "concurrency": concurrency, "pages": pages}
        # Both sides start at the same moment, even if the command reaches one of them later.
        start_at = time.monotonic() + START_DELAY_S
        return await self.both("rooms", first=first, start_at=start_at, ticking=ticking, **size)

    async def both(self, do: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        seen = await asyncio.gather(
            *(side.ask(do, **arguments) for side in (self.prefill, self.decode))
        )
        return seen[0], seen[1]

    async def raw_setup(self, **options: bool) -> dict[str, Any]:
        """Prepare bare writes, and return the fastest way of driving the bare plane."""
        return await self.prefill.ask("raw_setup", **await self.decode.ask("exported"), **options)

    async def bare_setup(self) -> None:
        """Prepare bare exchanges."""
        # Writes in a row land before their submission returns, so tuning would choose at random.
        # An exchange is fastest if the writer spins.
        await self.raw_setup(tuned=False)
        await self.decode.ask("bare_setup", **await self.prefill.ask("bare_setup"))

    async def bare_rooms(self, count: int, *, apart: bool = False) -> list[float]:
        """Run `count` bare exchanges, one after the other, and return the seconds of each. For
        `apart` see `BarePrefill.rooms`.
        """
        first, self._next_room = self._next_room, self._next_room + count
        # `rooms` pauses, too.
        await asyncio.sleep(START_DELAY_S)
        _, decode = await self.both("bare_rooms", first=first, count=count, apart=apart)
        return list(decode["seconds"])

    async def raw(self, count: int, pages: int) -> float:
        """Return the seconds that the bare data plane takes to move the bytes of `count` rooms."""
        first, self._next_room = self._next_room, self._next_room + count
        # `rooms` pauses, too. Without this pause, the write would be a third faster, because
        # sockets and caches would still be warm.
        await asyncio.sleep(START_DELAY_S)
        return float(
            (await self.prefill.ask("raw", first=first, count=count, pages=pages))["seconds"]
        )

    async def close(self) -> None:
        await self.decode.close()
        await self.prefill.close()


def room_figures(prefill: dict[str, Any], decode: dict[str, Any], gb: float) -> Row:
    """Return the figures of one turn from the answers of `WorkerPair.rooms`, which moved `gb` GB:
    GB/s, and CPU s/GB of each side.
    """
    seconds = max(decode["done"].values()) - min(decode["opened"].values())
    return {
        "gb_s": gb / seconds,
        "prefill_cpu_s_per_gb": prefill["cpu_s"] / gb,
        "decode_cpu_s_per_gb": decode["cpu_s"] / gb,
    }
