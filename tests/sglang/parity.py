"""Greedy answers of a prefill and a decode of SGLang against those of one SGLang: how many are
identical.

    make sglang ARGS="-k nothing"                                 # once: installs SGLang
    python tests/sglang/parity.py --requests 200 --page 1 16 64 --plane local mooncake nixl
    python tests/sglang/parity.py --chunk 128 --radix             # chunks; prefixes on both sides
    python tests/sglang/parity.py --leave 12                      # 12 more clients leave
    python tests/sglang/parity.py --pool 2048 --tokens 200        # decode retracts requests
    python tests/sglang/parity.py --family qwen3 --way router     # behind sglang_router
    python tests/sglang/parity.py --family zaya --alone           # is SGLang itself right here?
    python tests/sglang/parity.py --backend mooncake              # SGLang's own backend

Each combination is a line of a table. test_transfers.py is a smaller version.
The exit status is 1 where anything differs, does not start, or stays in use.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.sglang import router_of
from tests.engines import Prompt, at_once, eventually, start_all, stop_all
from tests.sglang.asking import BothLegs, ask, is_empty, new_session, random_prompts
from tests.sglang.models import FAMILIES, greedy_answer, make_model, new_model, words_of
from tests.sglang.servers import Server

LONGEST = 4096  # tokens of a prompt and its answer
POOL = 65536  # tokens of a KV cache
PLANES = ("local", "mooncake", "nixl")
Answers = list[list[int] | str]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--plane", nargs="+", default=["mooncake"], choices=PLANES)
    parser.add_argument("--backend", default="kvflow")
    parser.add_argument("--page", nargs="+", type=int, default=[16])
    parser.add_argument("--way", nargs="+", default=["hand"], choices=["hand", "router"])
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk; 0: SGLang's own")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel, at prefill")
    parser.add_argument("--decode-ranks", type=int, default=0, help="0: as many as at prefill")
    parser.add_argument("--stages", type=int, default=1, help="of prefill's pipeline")
    parser.add_argument("--radix", action="store_true", help="decode keeps prefixes")
    parser.add_argument("--leave", type=int, default=0, help="clients that leave, before half time")
    parser.add_argument("--pool", type=int, default=0, help="tokens of decode's KV cache")
    parser.add_argument("--family", default="llama", choices=sorted(FAMILIES))
    parser.add_argument(
        "--alone", action="store_true", help="one SGLang against transformers, and no pair"
    )
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--logs", type=Path, default=None)
    return parser.parse_args()


def pair_of(
    options: argparse.Namespace, model: Path, logs: Path, plane: str, page: int
) -> tuple[Server, Server]:
    words = ["--max-total-tokens", str(POOL), *words_of(options.family, page)]
    words += ["--chunked-prefill-size", str(options.chunk)] if options.chunk else []
    both: dict[str, Any] = {"page": page, "backend": options.backend}
    shape = {"ranks": options.ranks, "stages": options.stages}
    ranks = options.decode_ranks or options.ranks
    if options.backend == "kvflow":
        both["transfer_backend"] = plane
        if ranks != options.ranks:
            shape["decode_tp_size"] = ranks
    radix = ["--disaggregation-decode-enable-radix-cache"] if options.radix else []
    pool = []
    if options.pool:
        # With SGLang's own reserve for each request it admits too few to retract any.
        pool = ["--max-total-tokens", str(options.pool), "--num-reserved-decode-tokens", "8"]
    name = f"{plane}-{page}"
    return (
        Server("prefill", model, logs, *words, name=f"prefill-{name}", **shape, **both),
        Server(
            "decode", model, logs, *words, *radix, *pool, name=f"decode-{name}", ranks=ranks, **both
        ),
    )


async def leave(prefill: Server, decode: Server, prompts: list[Prompt], rng: random.Random) -> None:
    async with new_session() as session:

        async def one(prompt: Prompt) -> None:
            legs = BothLegs(session, prefill, decode, prompt, 200)
            await asyncio.sleep(rng.random() * 1.5)
            await legs.leave()

        await at_once(6, [partial(one, prompt) for prompt in prompts])


@asynccontextmanager
async def way_to(prefill: Server, decode: Server, way: str) -> AsyncIterator[str | None]:
    """The URL of a router in front of the pair; None where the legs are sent by hand."""
    if way == "hand":
        yield None
        return
    async with router_of(prefill.url, prefill.bootstrap_port, decode.url) as url:
        yield url


async def answers_of(options: argparse.Namespace, server: Server, prompts: list[Prompt]) -> Answers:
    async with new_session() as session:
        jobs = [partial(ask, session, server.url, prompt, options.tokens) for prompt in prompts]
        return [answer.tokens for answer in await at_once(options.at_once, jobs)]


async def answers_of_pair(
    options: argparse.Namespace, pair: tuple[Server, Server], way: str, prompts: list[Prompt]
) -> tuple[Answers, float]:
    """Return the answers and the seconds that they took, when both servers are empty again."""
    rng = random.Random(options.seed + 1)
    if options.leave:
        await leave(*pair, random_prompts(rng, options.leave, options.longest), rng)
    async with new_session() as session:

        async def one(url: str | None, prompt: Prompt) -> list[int] | str:
            if url is not None:
                answer = await ask(session, url, prompt, options.tokens)
            else:
                answer = await BothLegs(session, *pair, prompt, options.tokens).answer()
            return answer.tokens if answer.status == 200 else answer.text

        async with way_to(*pair, way) as url:
            began = time.monotonic()
            got = await at_once(options.at_once, [partial(one, url, prompt) for prompt in prompts])
            took = time.monotonic() - began
        for server in pair:
            await eventually(partial(is_empty, session, server), f"{server.name} is empty")
    return got, took


def report(prompts: list[Prompt], got: Answers, wanted: Answers, other: str) -> int:
    """Print what differs. Returns how many are the same."""
    same = 0
    for prompt, ours, theirs in zip(prompts, got, wanted, strict=True):
        same += ours == theirs
        if ours != theirs:
            print(f"{len(prompt)} tokens: {ours}\n  {other}: {theirs}")
    return same


def compare_alone(options: argparse.Namespace, single: Server, prompts: list[Prompt]) -> bool:
    """Compare one SGLang with transformers."""
    import torch

    got = asyncio.run(answers_of(options, single, prompts))
    torch.set_num_threads(1)  # more of them wait for each other on a machine that is busy
    model = new_model(options.family, longest=LONGEST).eval()
    wanted: Answers = [greedy_answer(model, prompt, options.tokens) for prompt in prompts]
    same = report(prompts, got, wanted, "transformers")
    distinct = len(set(map(tuple, got)))
    print(f"{same} of {len(prompts)} as transformers, {distinct} distinct", flush=True)
    return same == len(prompts)


def compare_pair(
    options: argparse.Namespace,
    pair: tuple[Server, Server],
    row: str,
    prompts: list[Prompt],
    wanted: Answers,
) -> bool:
    good = True
    for way in options.way:
        got, took = asyncio.run(answers_of_pair(options, pair, way, prompts))
        same = report(prompts, got, wanted, "one SGLang")
        print(f"| {row} | {way} | {same} of {len(prompts)} | {took:.0f} s |", flush=True)
        good &= same == len(prompts)
    if options.pool:
        print(f"{pair[1].text().count('KV cache pool is full')} retractions at decode")
    return good


def compare(options: argparse.Namespace, model: Path, logs: Path) -> bool:
    prompts = random_prompts(
        random.Random(options.seed), options.requests, options.longest, options.page
    )
    words = ("--max-total-tokens", str(POOL), *words_of(options.family, options.page[0]))
    single = Server("single", model, logs, *words, page=options.page[0])
    running, good = [single], True
    try:
        start_all(running)
        if options.alone:
            return compare_alone(options, single, prompts)
        wanted = asyncio.run(answers_of(options, single, prompts))
        print(f"{len(set(map(tuple, wanted)))} distinct answers of one SGLang")
        for page, plane in product(options.page, options.plane):
            pair = pair_of(options, model, logs, plane, page)
            running += pair
            row = f"{options.family} | {page} | {plane}"
            try:
                start_all(pair)
                good &= compare_pair(options, pair, row, prompts, wanted)
            except AssertionError as error:
                print(f"| {row} | | {error} | |", flush=True)
                good = False
            stop_all(pair)
        return good
    finally:
        stop_all(running)


def main() -> int:
    options = read_arguments()
    print(" ".join(f"{name}={value}" for name, value in vars(options).items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = make_model(options.family, Path(folder) / "model", longest=LONGEST)
        return 0 if compare(options, model, logs) else 1


if __name__ == "__main__":
    sys.exit(main())
