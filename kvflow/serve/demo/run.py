"""The steps of the demo: reference, completions, comparison, abort, and the check for free pages.

The exit status is 0 only if all checks pass.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec

from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.settings import ENV_PREFIX, Settings
from kvflow.serve.config.sources import resolve
from kvflow.serve.demo.client import Aborted, DemoError, FleetClient, Streamed
from kvflow.serve.demo.show import DemoOutput, ProgressOutput, TerminalOutput
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.child import ChildEndedError
from kvflow.serve.launch.doctor import plane_unavailable_reason
from kvflow.serve.launch.supervisor import Fleet
from kvflow.transports.data.select import PLANES

# With this data type, kvflow and stock transformers agree on every token.
DTYPE = "float32"
CONCURRENT = 8
SHOWN = 2
LONG_PROMPT_TOKENS = 1024
ABORT_TRANSFER_S = 5.0
POOL_TOKENS = 16_384
PAGE_SIZE = 16
TICK_S = 2.0  # longest time without a line of output


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one data plane, which --json prints."""

    backend: str
    requests: int
    identical: int
    aborted: int
    bytes_at_abort: int
    bytes_total: int
    pages_home: bool
    bytes_moved: int

    @property
    def good(self) -> bool:
        matched = self.identical == self.requests
        return (
            matched
            and self.aborted >= 1
            and 0 < self.bytes_at_abort < self.bytes_total
            and self.pages_home
        )


SHOWN_PLANES = ("local", "mooncake")  # shown if no --transfer-backend is given


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The model, prompts and lengths for one run of the demo."""

    model: str
    prompts: list[str]
    new_tokens: int

    @property
    def shown_model(self) -> str:
        return "the packaged model" if self.model == str(DEMO_MODEL_DIR) else self.model


def run_demo(model: str, backend: str, *, as_json: bool, requests: int, new_tokens: int) -> int:
    """Run `kvflow demo`, and return its exit status. Raises: MisuseError."""
    if backend and backend not in PLANES:
        raise MisuseError(f"--transfer-backend: {backend!r}: expected one of {', '.join(PLANES)}")
    reason = plane_unavailable_reason(backend or "mooncake")
    if backend and reason:
        raise MisuseError(reason)
    # The demo's roles inherit the environment. KVFLOW_* variables must not change their settings.
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        del os.environ[name]
    plan = Plan(
        model=model or str(DEMO_MODEL_DIR), prompts=_prompts(requests), new_tokens=new_tokens
    )
    output: DemoOutput = ProgressOutput() if as_json else TerminalOutput()
    backends = (
        [backend] if backend else [name for name in SHOWN_PLANES if name == "local" or not reason]
    )
    outcomes = asyncio.run(_all(plan, backends, output))
    if as_json:
        for outcome in outcomes:
            sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")
    if not backend and reason:
        output.line(f"mooncake was not run: {reason}")
        if as_json:
            sys.stderr.write(f"mooncake was not run: {reason}\n")
    good = all(outcome.good for outcome in outcomes)
    output.line(
        "[bold green]All outputs match, and every page is free again.[/]"
        if good
        else "[bold red]The demo failed.[/]"
    )
    return 0 if good else 1


def _prompts(count: int) -> list[str]:
    known = list(DEMO_PROMPTS)
    joined = [f"{a} {b}" for a in known for b in known if a != b]
    return (known + joined)[:count]


async def _all(plan: Plan, backends: list[str], output: DemoOutput) -> list[Outcome]:
    # The reference takes a long time, so it runs at the same time as the first fleet.
    expected = asyncio.create_task(_stock(plan))
    try:
        return [await _one(plan, backend, expected, output) for backend in backends]
    except ChildEndedError as error:
        # Status 2 means a wrong setting that the user can correct, such as a missing model.
        if error.status == 2:
            raise MisuseError(str(error)) from None
        raise
    finally:
        expected.cancel()
        await asyncio.wait([expected])


async def _stock(plan: Plan) -> list[list[int]]:
    request = {
        "model": plan.model,
        "dtype": DTYPE,
        "prompts": plan.prompts,
        "new_tokens": plan.new_tokens,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "kvflow.serve.demo.stock",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    try:
        out, err = await process.communicate(msgspec.json.encode(request))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        raise DemoError(
            f"stock transformers ended with status {process.returncode}: "
            f"{lines[-1] if lines else ''}"
        )
    return msgspec.json.decode(out, type=list[list[int]])


async def _one(
    plan: Plan, backend: str, expected: asyncio.Task[list[list[int]]], output: DemoOutput
) -> Outcome:
    output.line(
        f"\n[bold]{backend}[/]: starting router, prefill and decode with {plan.shown_model}"
    )
    async with _started(plan, backend, 0, output) as client:
        done, together = await _completions(client, plan, output)
        info = await client.get(f"{client.prefill}/server_info")
        long_prompt = _long_prompt(done, info["max_model_len"] // 2)
        await client.move(long_prompt)
        moved, seconds = await client.moved()
        good_room = await client.latest_room()
        at_rest = await client.pages_at_rest()
    output.line("comparing with stock transformers, in a process of its own ...")
    async with _ticking(output, "stock transformers"):
        wanted = await expected
    same = [d.output_ids == ids for d, ids in zip(done, wanted, strict=True)]
    output.table(done, same, backend)
    output.line(f"{sum(same)} of {len(same)} identical to stock transformers")
    output.line(
        f"tokens/s: {done[-1 if len(done) <= SHOWN else SHOWN - 1].tokens_per_s:,.0f} alone, "
        f"{together}"
    )
    rate = f", {moved / seconds / 1e9:.3f} GB/s while writing" if seconds else ""
    output.line(f"{moved:,} bytes moved through [bold]{backend}[/]{rate}")
    output.room(f"a prompt of {len(long_prompt)} tokens, from both sides:", good_room)
    # If two prompts had the same output, a fleet that confuses its rooms could pass the comparison.
    if len({tuple(d.output_ids) for d in done}) != len(done):
        raise DemoError(
            "two prompts have the same output, so the comparison proves nothing; use another model"
        )
    total = -(-len(long_prompt) // PAGE_SIZE) * info["pool"]["page_bytes"]
    aborted, at_rest_after = await _aborted(plan, backend, long_prompt, total, output)
    return Outcome(
        backend=backend,
        requests=len(done),
        identical=sum(same),
        aborted=1 if aborted.bytes_at_abort < aborted.bytes_total else 0,
        bytes_at_abort=aborted.bytes_at_abort,
        bytes_total=aborted.bytes_total,
        pages_home=at_rest and at_rest_after,
        bytes_moved=moved,
    )


async def _completions(
    client: FleetClient, plan: Plan, output: DemoOutput
) -> tuple[list[Streamed], str]:
    """Complete a few prompts one by one and the others concurrently.

    Return all completions, and the rate of the concurrent ones as text.
    """
    shown = []
    for prompt in plan.prompts[:SHOWN]:
        with output.streaming(prompt) as show:
            shown.append(await client.complete(prompt, plan.new_tokens, show))
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(prompt: str) -> Streamed:
        async with gate:
            return await client.complete(prompt, plan.new_tokens)

    others = plan.prompts[SHOWN:]
    if others:
        output.line(f"and {len(others)} more, {min(len(others), CONCURRENT)} at once ...")
    started = time.perf_counter()
    rest = await asyncio.gather(*(one(prompt) for prompt in others))
    tokens, took_s = sum(len(done.output_ids) for done in rest), time.perf_counter() - started
    together = (
        f"{tokens / took_s:,.0f} with {min(len(rest), CONCURRENT)} at once" if rest else "no others"
    )
    return [*shown, *rest], together


def _long_prompt(done: list[Streamed], most: int) -> list[int]:
    """Repeat the generated token ids, so that the transfer takes long enough to measure."""
    ids = [token for streamed in done for token in streamed.output_ids]
    count = min(LONG_PROMPT_TOKENS, most)
    return (ids * (count // len(ids) + 1))[:count]


async def _aborted(
    plan: Plan, backend: str, prompt: list[int], total_bytes: int, output: DemoOutput
) -> tuple[Aborted, bool]:
    """Return the aborted room, and True if every page is free afterwards."""
    rate = max(1, int(total_bytes / ABORT_TRANSFER_S))
    output.line(
        f"aborting a {len(prompt)}-token prompt in mid-transfer (rate limit {rate:,} bytes/s) ..."
    )
    async with _started(plan, backend, rate, output) as client:
        aborted = await client.abort_in_mid_transfer(prompt)
        at_rest = await client.pages_at_rest()
    output.room(f"the aborted room {aborted.room}, from both sides:", aborted.sides)
    output.line(
        f"{aborted.bytes_at_abort:,} of {aborted.bytes_total:,} bytes had landed when the room "
        "ended"
    )
    output.line(f"every page of both pools is free again: {'yes' if at_rest else '[red]no[/]'}")
    return aborted, at_rest


@asynccontextmanager
async def _started(
    plan: Plan, backend: str, rate: int, output: DemoOutput
) -> AsyncGenerator[FleetClient]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=timeout, read_bufsize=1 << 22)
        )
        async with _ticking(output, "starting"):
            fleet = await stack.enter_async_context(_fleet(plan, backend, rate))
        yield FleetClient(session, fleet.url, fleet.prefills[0].url, fleet.decodes[0].url)


@asynccontextmanager
async def _ticking(output: DemoOutput, what: str) -> AsyncGenerator[None]:
    started = time.perf_counter()

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            output.line(f"  {what}: {time.perf_counter() - started:.0f} s ...")

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.wait([ticking])


def _fleet(plan: Plan, backend: str, rate: int) -> Fleet:
    given = {
        "model_path": plan.model,
        "port": 0,
        "dtype": DTYPE,
        # Stock transformers also runs on the CPU. Another device would round differently.
        "device": "cpu",
        "page_size": PAGE_SIZE,
        "num_pages": POOL_TOKENS // PAGE_SIZE,
        "disaggregation_transfer_backend": backend,
        "transfer_rate_limit": rate,
        "poll_s": 0.2,
        "drain_timeout_s": 2.0,
    }
    settings: Settings = resolve("up", given, env={})
    return Fleet(settings, given, quiet=True)
