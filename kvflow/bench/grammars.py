"""`kvflow bench grammars`: tokens per second of answers that match a grammar, and of others.

In each turn, the same prompts run as concurrent streams through the router once for each kind of
answer, in changing order, so both sides of a ratio come from one turn. No answer ends before its
last token: the grammars ask for more than that. The demo model has not learned to write JSON, so it
is told to write something else far more often than a real model would be.
"""

from __future__ import annotations

import json
from typing import Any

from kvflow.bench.figures import Say, extremes
from kvflow.bench.pair import Process
from kvflow.bench.serve import Server, prompt_of, serving
from kvflow.protocols.errors import KvflowError
from kvflow.serve.demo_model import DEMO_MODEL_DIR

FREE = "free"
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}


async def bench_grammars(
    clients: tuple[int, ...],
    new_tokens: int,
    temperature: float,
    turns: int,
    threads: int,
    say: Say,
    model: str = "",
) -> dict[str, Any]:
    """Return the time between tokens and the CPU time of decode for each number of clients.

    Raises: KvflowError if the server does not start, or if an answer ends early.
    """
    report: dict[str, Any] = {"new_tokens": new_tokens, "temperature": temperature, "clients": {}}
    sampling = {"temperature": temperature, "sampling_seed": 1}
    kinds = {kind: {**sampling, **more} for kind, more in _kinds(new_tokens).items()}
    async with (
        serving(model or str(DEMO_MODEL_DIR), threads) as server,
        await Process.run_module("kvflow.bench.stream_client") as client,
    ):
        for number in clients:
            found = await _compared(server, client, number, new_tokens, kinds, turns)
            report["clients"][str(number)] = found
            for kind, figures in found.items():
                say(f"{number} clients, {kind}: {figures}")
    return report


async def _compared(
    server: Server,
    client: Process,
    clients: int,
    new_tokens: int,
    kinds: dict[str, dict[str, Any]],
    turns: int,
) -> dict[str, Any]:
    """Return the figures of each kind of answer; ratios are to the time of free ones."""
    prompts = [prompt_of(i) for i in range(clients)]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu_us: dict[str, list[float]] = {kind: [] for kind in kinds}
    # Turn -1 warms up and does not count.
    for turn in range(-1, turns):
        for kind in list(kinds)[:: 1 if turn % 2 else -1]:
            before_s = server.cpu_s()["decode"]
            got = await client.ask(
                "stream",
                url=server.urls["router"],
                api="generate",
                prompts=prompts,
                new_tokens=new_tokens,
                sampling=kinds[kind],
            )
            cpu_s = server.cpu_s()["decode"] - before_s
            if lengths := {len(tokens) for tokens in got["tokens"]} - {new_tokens}:
                raise KvflowError(f"{kind}: answers of {lengths} tokens, not {new_tokens}")
            if turn >= 0:
                # The first token includes the time to compile a grammar, once.
                seconds[kind].append(got["after_first_s"])
                cpu_us[kind].append(cpu_s / clients / new_tokens * 1e6)
    return {
        kind: {
            "time_ratio": extremes(
                [a / b for a, b in zip(seconds[kind], seconds[FREE], strict=True)]
            ),
            "cpu_ratio": extremes([a / b for a, b in zip(cpu_us[kind], cpu_us[FREE], strict=True)]),
            "ms_between_tokens": extremes([s / (new_tokens - 1) * 1e3 for s in seconds[kind]]),
            "decode_cpu_us_per_token": extremes(cpu_us[kind]),
        }
        for kind in kinds
    }


def _kinds(new_tokens: int) -> dict[str, dict[str, Any]]:
    schema = {"type": "array", "items": _ITEM, "minItems": new_tokens}
    return {
        FREE: {},
        "json_schema": {"json_schema": json.dumps(schema), "ignore_eos": False},
        "regex": {"regex": rf"[a-zA-Z0-9 .,()_=\n]{{{20 * new_tokens}}}", "ignore_eos": False},
    }
