"""Greedy answers of a prefill and a decode of vLLM against those of one vLLM: how many are
identical.

    make vllm ARGS="-k version"                                   # once: installs vLLM
    python tests/vllm/parity.py --requests 1000 --plane mooncake  # or local, nixl
    python tests/vllm/parity.py --family gemma3                   # or llama, qwen3_next, ...
    python tests/vllm/parity.py --family qwen3_next --dtype bfloat16
    python tests/vllm/parity.py --family falcon_h1 --no-prefixes  # vLLM's Mamba 2 on CPUs needs it
    python tests/vllm/parity.py --prefill-tp 1 --decode-tp 2      # or any other two
    python tests/vllm/parity.py --staged                          # transfers through host memory
    python tests/vllm/parity.py --shared 0.8                      # most share a beginning
    python tests/vllm/parity.py --blocks 260                      # so few that vLLM preempts
    python tests/vllm/parity.py --requests 500 --cut-off 0.3      # 30 % are cut off

Half of the requests' legs follow each other, and half are asked together. Answers that part where
one vLLM gives two tokens the same log-probability, as far as float32 goes, are counted as ties. It
takes several minutes on two cores, so it is not in CI; test_transfers.py is its smaller version
there. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engines import Prompt, at_once, eventually, random_prompt, start_all, stop_all
from tests.vllm.asking import (
    Answer,
    BothLegs,
    ask,
    ask_prefill,
    is_empty,
    is_tie,
    measure,
    new_session,
    random_prompts,
)
from tests.vllm.models import FAMILIES, make_model
from tests.vllm.servers import Server


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2000, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--plane", default="mooncake", choices=["mooncake", "local", "nixl"])
    parser.add_argument("--family", default="llama", choices=list(FAMILIES))
    parser.add_argument(
        "--shared", type=float, default=0.0, help="share of the prompts with a common beginning"
    )
    parser.add_argument(
        "--blocks", type=int, default=0, help="of the KV caches of prefill and decode; 0: 1 GiB"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prefill-tp", type=int, default=1, help="workers of prefill")
    parser.add_argument("--decode-tp", type=int, default=1, help="workers of decode")
    parser.add_argument(
        "--staged", action="store_true", help="transfers pass through 32 MiB of host memory"
    )
    parser.add_argument("--no-prefixes", action="store_true", help="vLLM without its prefix cache")
    parser.add_argument(
        "--cut-off", type=float, default=0.0, help="share of the requests that is cut off"
    )
    parser.add_argument("--within-s", type=float, default=3.0, help="the latest moment of a cut")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--logs", type=Path, default=None)
    return parser.parse_args()


def prompts_of(options: argparse.Namespace, rng: random.Random) -> list[Prompt]:
    prompts = random_prompts(rng, options.requests, options.longest)
    beginnings = [random_prompt(rng, options.longest) for _ in range(4)]
    for number, prompt in enumerate(prompts):
        if rng.random() < options.shared:
            common = rng.randrange(len(prompt) + 1)
            prompts[number] = rng.choice(beginnings)[:common] + prompt[common:]
    return prompts


class Run:
    """The requests of one run, through a pair of servers."""

    def __init__(
        self, options: argparse.Namespace, prefill: Server, decode: Server, single: Server
    ) -> None:
        self.options, self.prefill, self.decode, self.single = options, prefill, decode, single
        self.session = new_session()
        rng = random.Random(options.seed)
        self.prompts = prompts_of(options, rng)
        self.cuts = [rng.random() < options.cut_off for _ in self.prompts]
        self._draw = rng

    async def one(self, number: int) -> Answer | None:
        """Its answer; None for one that was cut off."""
        together, moment = bool(number % 2), self._draw.random() * self.options.within_s
        if not self.cuts[number]:
            return await (self._together if together else self._sequential)(self.prompts[number])
        with suppress(TimeoutError):
            async with asyncio.timeout(moment):
                if not together:
                    await self._sequential(self.prompts[number])
                else:
                    await self._cut_leg(
                        self.prompts[number], self._draw.choice(["prefill", "decode"]), moment
                    )
        return None

    async def _sequential(self, prompt: Prompt) -> Answer:
        params = await ask_prefill(self.session, self.prefill, prompt)
        return await ask(self.session, self.decode.url, prompt, self.options.tokens, params)

    async def _together(self, prompt: Prompt) -> Answer:
        return await BothLegs(
            self.session, self.prefill, self.decode, prompt, self.options.tokens
        ).answer()

    async def _cut_leg(self, prompt: Prompt, leg: str, moment: float) -> None:
        legs = BothLegs(self.session, self.prefill, self.decode, prompt, self.options.tokens)
        await asyncio.sleep(moment / 2)
        getattr(legs, leg).cancel()
        await asyncio.gather(legs.prefill, legs.decode, return_exceptions=True)

    async def judge(self, prompt: Prompt, ours: Answer, theirs: Answer) -> str:
        if ours.status != 200:
            return ours.text
        if ours.tokens == theirs.tokens:
            return "identical"
        tokens = ours.tokens, theirs.tokens
        if await is_tie(self.session, self.single, prompt, *tokens, self.options.dtype):
            return "tie"
        print(f"{len(prompt)} tokens: differ\n  {ours.tokens}\n  {theirs.tokens}")
        return "different"

    async def all(self) -> bool:
        """Returns whether all is well."""
        options, began = self.options, time.monotonic()
        got = await at_once(
            options.at_once, [partial(self.one, number) for number in range(len(self.prompts))]
        )
        took, began = time.monotonic() - began, time.monotonic()
        whole = [
            (prompt, answer)
            for prompt, answer in zip(self.prompts, got, strict=True)
            if answer is not None
        ]
        asked = [
            partial(ask, self.session, self.single.url, prompt, options.tokens)
            for prompt, _ in whole
        ]
        wanted = await at_once(options.at_once, asked)
        alone = time.monotonic() - began
        found = Counter(
            [await self.judge(prompt, a, b) for (prompt, a), b in zip(whole, wanted, strict=True)]
        )
        lengths = [len(prompt) for prompt in self.prompts]
        print(f"{dict(found)} of {len(whole)}, {sum(self.cuts)} cut off")
        print(
            f"{took:.1f} s in rooms, {alone:.1f} s at one vLLM; {options.tokens} tokens each; "
            f"prompts of {min(lengths)}"
        )
        print(
            f"to {max(lengths)} tokens, {sum(lengths)} in all; "
            f"{len({tuple(each.tokens) for each in wanted})} distinct"
        )
        sys.stdout.flush()
        for server in (self.prefill, self.decode):
            await eventually(
                partial(is_empty, self.session, server), f"{server.name} gives everything back", 60
            )
            moved = await measure(self.session, server.status_url, "kvflow_transfer_bytes_total")
            failed = await measure(self.session, server.status_url, "kvflow_rooms_failed_total")
            preempted = await measure(self.session, server.url, "vllm:num_preemptions_total")
            print(
                f"{server.name}: {moved / 1e6:.1f} MB moved, {failed:.0f} rooms failed, "
                f"{preempted:.0f} preemptions;"
            )
            print("  its KV cache and quarantine are empty", flush=True)
        return set(found) <= {"identical", "tie"}


async def run(options: argparse.Namespace, prefill: Server, decode: Server, single: Server) -> bool:
    this = Run(options, prefill, decode, single)
    async with this.session:
        return await this.all()


def main() -> int:
    options = read_arguments()
    print(" ".join(f"{name}={value}" for name, value in vars(options).items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = make_model(options.family, Path(folder) / "model")
        few = ["--num-gpu-blocks-override", str(options.blocks)] if options.blocks else []
        # The last of two equal options counts.
        own = ["--dtype", options.dtype]
        own += ["--no-enable-prefix-caching"] if options.no_prefixes else []
        few += own
        settings: dict[str, Any] = {
            "transfer_backend": options.plane,
            "source_deadline_s": 10.0,
        }
        if options.staged:
            settings |= {"staging": "always", "staging_bytes": 32 << 20}
        both = [
            ["--tensor-parallel-size", str(count)]
            for count in (options.prefill_tp, options.decode_tp)
        ]
        prefill = Server(
            "prefill",
            model,
            logs,
            *few,
            *both[0],
            decode_workers=options.decode_tp,
            **settings,
        )
        decode = Server("decode", model, logs, *few, *both[1], **settings)
        single = Server("single", model, logs, *own)
        servers = [prefill, decode, single]
        try:
            start_all(servers)
            return 0 if asyncio.run(run(options, prefill, decode, single)) else 1
        finally:
            stop_all(servers)


if __name__ == "__main__":
    sys.exit(main())
