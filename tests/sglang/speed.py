"""Speed of a prefill and a decode of SGLang with kvflow, beside SGLang's own mooncake backend.

    make sglang ARGS="-k nothing"                       # once: installs SGLang
    python tests/sglang/speed.py                        # 16 requests at once
    python tests/sglang/speed.py --at-once 1 --tokens 2 # one at a time

The pairs take turns. A row gives requests per second, the time to the first token, and the CPU time
of all processes of the pair per request. The last rows give medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from tests.engines import Prompt, at_once, random_prompt, start_all, stop_all
from tests.sglang.asking import ask, new_session
from tests.sglang.servers import Server
from tests.vllm.models import make_model

WARM_UP = 16  # requests


class Row(NamedTuple):
    requests_per_s: float
    first_p50_ms: float
    first_p95_ms: float
    cpu_ms: float

    def __str__(self) -> str:
        return (
            f"{self.requests_per_s:6.1f} requests/s, first token p50 {self.first_p50_ms:5.0f} ms, "
            f"p95 {self.first_p95_ms:5.0f} ms, CPU {self.cpu_ms:5.0f} ms per request"
        )


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["mooncake", "kvflow"])
    parser.add_argument("--plane", default="mooncake", choices=["mooncake", "local", "nixl"])
    parser.add_argument("--turns", type=int, default=3, help="starts of each pair")
    parser.add_argument("--loads", type=int, default=3, help="loads in one turn")
    parser.add_argument("--requests", type=int, default=64, help="in one load")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=100, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer")
    return parser.parse_args()


async def first_token_s(prefill: Server, decode: Server, prompt: Prompt, count: int) -> float:
    """Send both legs, and return the seconds until decode's first token."""
    where = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": secrets.randbits(62),
    }
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, **where}
    async with new_session() as session:
        began = time.monotonic()
        other = asyncio.create_task(ask(session, prefill.url, prompt, count, **where))
        first = 0.0
        async with session.post(f"{decode.url}/generate", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - began
                    assert "error" not in json.loads(line[6:]), line
        assert (await other).status == 200 and first
        return first


async def load(
    options: argparse.Namespace, pair: tuple[Server, Server], seed: int, count: int
) -> Row:
    rng = random.Random(seed)
    lengths = [rng.randint(options.shortest, options.longest) for _ in range(count)]
    prompts = [random_prompt(rng, length) for length in lengths]
    jobs = [partial(first_token_s, *pair, prompt, options.tokens) for prompt in prompts]
    before_s, began = cpu_s(pair), time.monotonic()
    firsts = sorted(await at_once(options.at_once, jobs))
    took = time.monotonic() - began
    p50, p95 = (firsts[int(len(firsts) * part)] * 1e3 for part in (0.5, 0.95))
    return Row(count / took, p50, p95, (cpu_s(pair) - before_s) / count * 1e3)


def cpu_s(pair: tuple[Server, Server]) -> float:
    total = 0.0
    for process in (each for server in pair for each in server.find_family()):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def main() -> None:
    options = read_arguments()
    rows: dict[str, list[Row]] = {backend: [] for backend in options.backends}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "model")
        for turn in range(options.turns):
            for backend in options.backends:
                more = {"transfer_backend": options.plane} if backend == "kvflow" else {}
                prefill, decode = (
                    Server(role, model, Path(folder), backend=backend, **more)
                    for role in ("prefill", "decode")
                )
                pair = (prefill, decode)
                try:
                    start_all(pair)
                    asyncio.run(load(options, pair, 0, WARM_UP))
                    for number in range(options.loads):
                        seed = turn * options.loads + number + 1
                        row = asyncio.run(load(options, pair, seed, options.requests))
                        rows[backend].append(row)
                        print(f"{backend:10} {row}", flush=True)
                finally:
                    stop_all(pair)
    for backend, found in rows.items():
        print(
            f"{backend:10} {Row(*map(statistics.median, zip(*found, strict=True)))}, "
            f"median of {len(found)}"
        )


if __name__ == "__main__":
    main()
