"""Greedy answers of a prefill and a decode of SGLang against those of one SGLang: how many are
identical.

    make sglang ARGS="-k nothing"                                 # once: installs SGLang
    python tests/sglang/parity.py --requests 200 --plane mooncake # or local, nixl
    python tests/sglang/parity.py --page 1 --chunk 128            # chunked prefill
    python tests/sglang/parity.py --leave 12                      # 12 more clients leave
    python tests/sglang/parity.py --pool 2048 --tokens 200        # decode retracts requests
    python tests/sglang/parity.py --family qwen3 --router         # behind sglang_router
    python tests/sglang/parity.py --backend mooncake              # SGLang's own backend

test_transfers.py is its smaller version. The exit status is 1 where anything differs.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.e2e.sglang import router_of
from tests.engines import Prompt, at_once, start_all, stop_all
from tests.sglang.asking import BothLegs, ask, new_session, random_prompts
from tests.sglang.servers import Server
from tests.vllm.models import make_model

LONGEST = 4096  # tokens of a prompt and its answer
POOL = 65536  # tokens of a KV cache


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--plane", default="mooncake", choices=["mooncake", "local", "nixl"])
    parser.add_argument("--backend", default="kvflow")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk; 0: SGLang's own")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel, on both sides")
    parser.add_argument("--stages", type=int, default=1, help="of prefill's pipeline")
    parser.add_argument("--radix", action="store_true", help="decode keeps prefixes")
    parser.add_argument("--leave", type=int, default=0, help="clients that leave, before half time")
    parser.add_argument("--pool", type=int, default=0, help="tokens of decode's KV cache")
    parser.add_argument("--family", default="llama", choices=["llama", "qwen3"])
    parser.add_argument("--router", action="store_true", help="behind sglang_router")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--logs", type=Path, default=None)
    return parser.parse_args()


async def leave(prefill: Server, decode: Server, prompts: list[Prompt], rng: random.Random) -> None:
    async with new_session() as session:

        async def one(prompt: Prompt) -> None:
            legs = BothLegs(session, prefill, decode, prompt, 200)
            await asyncio.sleep(rng.random() * 1.5)
            await legs.leave()

        await at_once(6, [partial(one, prompt) for prompt in prompts])


@asynccontextmanager
async def router(
    options: argparse.Namespace, prefill: Server, decode: Server
) -> AsyncIterator[str | None]:
    """The URL of a router in front of the pair; None where the legs are sent by hand."""
    if not options.router:
        yield None
        return
    async with router_of(prefill.url, prefill.bootstrap_port, decode.url) as url:
        yield url


async def compare(
    options: argparse.Namespace, prefill: Server, decode: Server, single: Server
) -> bool:
    rng = random.Random(options.seed)
    prompts = random_prompts(rng, options.requests, options.longest)
    if options.leave:
        gone = random_prompts(rng, options.leave, options.longest)
        await leave(prefill, decode, gone, rng)
    async with new_session() as session:

        async def one(url: str | None, prompt: Prompt) -> list[int] | str:
            if url is not None:
                answer = await ask(session, url, prompt, options.tokens)
            else:
                answer = await BothLegs(session, prefill, decode, prompt, options.tokens).answer()
            return answer.tokens if answer.status == 200 else answer.text

        async with router(options, prefill, decode) as url:
            began = time.monotonic()
            got = await at_once(options.at_once, [partial(one, url, prompt) for prompt in prompts])
            took = time.monotonic() - began
        wanted = await at_once(
            options.at_once,
            [partial(ask, session, single.url, prompt, options.tokens) for prompt in prompts],
        )
    if options.pool:
        print(f"{decode.text().count('KV cache pool is full')} retractions at decode")
    same = 0
    for prompt, ours, theirs in zip(prompts, got, wanted, strict=True):
        same += ours == theirs.tokens
        if ours != theirs.tokens:
            print(f"{len(prompt)} tokens: {ours}\n  one SGLang: {theirs.tokens}")
    distinct = len({tuple(each.tokens) for each in wanted})
    print(f"{same} of {len(prompts)} identical, {distinct} distinct, in {took:.1f} s", flush=True)
    return same == len(prompts)


def main() -> int:
    options = read_arguments()
    print(" ".join(f"{name}={value}" for name, value in vars(options).items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = make_model(options.family, Path(folder) / "model", longest=LONGEST)
        words = ["--max-total-tokens", str(POOL)]
        words += ["--chunked-prefill-size", str(options.chunk)] if options.chunk else []
        pair: dict[str, Any] = {
            "page": options.page,
            "backend": options.backend,
            "ranks": options.ranks,
        }
        if options.backend == "kvflow":
            pair["transfer_backend"] = options.plane
        prefill = Server("prefill", model, logs, *words, stages=options.stages, **pair)
        radix = ["--disaggregation-decode-enable-radix-cache"] if options.radix else []
        pool = []
        if options.pool:
            # With SGLang's own reserve for each request it admits too few to retract any.
            pool = ["--max-total-tokens", str(options.pool), "--num-reserved-decode-tokens", "8"]
        decode = Server("decode", model, logs, *words, *radix, *pool, **pair)
        single = Server("single", model, logs, *words[:2], page=options.page)
        servers = [prefill, decode, single]
        try:
            start_all(servers)
            return 0 if asyncio.run(compare(options, prefill, decode, single)) else 1
        finally:
            stop_all(servers)


if __name__ == "__main__":
    sys.exit(main())
