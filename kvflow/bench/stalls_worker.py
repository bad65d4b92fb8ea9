"""A process whose event loop `kvflow bench stalls` watches, or a decode that announces a crowd.

    python -m kvflow.bench.stalls_worker prefill|decode|idle|crowd

Commands: setup, watch, watched, connections, announce, announced, quit. The HTTP server, the
tokenizer, the node, the registry and the data plane are real. The engine makes tokens without a
model, so that prompts of a million tokens are served in a second.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop

from kvflow.bench.child import StallTicker, serve
from kvflow.bench.crowds import allow_many_connections
from kvflow.http.app import build_app
from kvflow.http.listening import bound_socket, listening_on
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.node.handoff import HandOff
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.ranks import rank_from_json, rank_to_json
from kvflow.serve.engine.model.sequence import Prompt, Sequence
from kvflow.serve.engine.scheduler.budget import Admission, PageBudget
from kvflow.serve.engine.scheduler.limits import EngineLimits
from kvflow.serve.engine.scheduler.params import EngineLoad, SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.rooms import DecodeRoomPort, PrefillRoomPort
from kvflow.serve.http import generate, openai
from kvflow.serve.http.completion_service import ModelCard
from kvflow.serve.http.engine_services import DecodeService, PrefillService
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.pipeline import CompletionPipeline
from kvflow.serve.http.registry import registry_app
from kvflow.serve.http.tokenizer import ThreadedTokenizer
from kvflow.testing.pair import until
from kvflow.transports.control.registry import RankTable, RegistryClient
from kvflow.transports.control.zmq import ZmqSocket
from kvflow.transports.data.select import open_plane

PAGES = 1 << 21
CONTEXT = 1 << 21
VOCABULARY = 1 << 17
CHUNK_PAGES = 1 << 13
PATIENCE_S = 120.0
TOP = tuple((token, -0.1 * token - 0.123456) for token in range(20))


class _Engine:
    """Base class of both engines, which have no model."""

    healthy = True
    failed_steps = 0
    cache = None  # no prefix cache

    def __init__(self, pool: PagedPool) -> None:
        self.pool = pool
        self.limits = EngineLimits(CONTEXT, VOCABULARY, 1, pool.layout.num_pages)
        self._budget = PageBudget(pool.pages)

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0)

    def end_requests(self) -> None:
        return None


class ReadyPrefill(_Engine):
    """A prefill engine that sends the pages of a prompt at once, without computing them."""

    async def prefill(
        self,
        room: PrefillRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        *,
        namespace: Namespace = ANY,
    ) -> TokenOut:
        self.limits.check_prompt(prompt)
        await room.matched()
        sequence = Sequence(("prefill", id(room)), prompt, 0, 1)
        sequence.add_pages(self.pool.pages.take(len(prompt), sequence.owner))
        try:
            handoff = HandOff(first_token=7, prompt_tokens=len(prompt)).encode()
            # Real engines send in chunks too: one call for a million pages would stall any loop.
            for start in range(0, len(prompt), CHUNK_PAGES):
                end = start + CHUNK_PAGES
                last = end >= len(prompt)
                room.send(sequence.pages[start:end], last=last, handoff=handoff if last else b"")
                await asyncio.sleep(0)
            await room.done()
        finally:
            self.pool.pages.give_back(sequence.pages, sequence.owner)
            room.close()
        return TokenOut(7, -0.5, TOP[: params.logprobs or 0])


class PacedDecode(_Engine):
    """A decode engine that makes a token every `pause_s`.

    The token is the one with the largest logit bias. Without biases, the engine cycles through 512
    tokens.
    """

    pause_s = 0.001

    async def admit(
        self, prompt: Prompt, params: SamplingParams, namespace: Namespace = ANY
    ) -> Admission:
        self.limits.check_prompt(prompt)
        return await self._budget.admit(self.limits.worst_pages(prompt, params.max_new_tokens))

    async def cached(
        self, prompt: Prompt, namespace: Namespace = ANY, admission: Admission | None = None
    ) -> None:
        return None

    async def generate(
        self,
        room: DecodeRoomPort,
        prompt: Prompt,
        params: SamplingParams,
        admission: Admission,
        prefix: None = None,
    ) -> AsyncGenerator[TokenOut, None]:
        admission.took(len(room.pages))
        sequence = Sequence(("sequence", id(room)), prompt, params.max_new_tokens, 1)
        biased, _ = max(params.logit_bias, key=lambda entry: entry[1], default=(None, 0))
        try:
            await room.landed()
            sequence.add_pages(room.keep(sequence.owner))
            for number in range(1, params.max_new_tokens + 1):
                last = number == params.max_new_tokens
                token = number % 512 if biased is None else biased
                yield TokenOut(token, -0.5, TOP[: params.logprobs or 0], "length" if last else None)
                await asyncio.sleep(self.pause_s)
        finally:
            self.pool.pages.give_back(sequence.pages, sequence.owner)
            room.close()
            admission.release()


class StallsWorker:
    def __init__(self, role: str) -> None:
        self._role = role
        self._stack = AsyncExitStack()
        self._ticker: StallTicker | None = None
        self._prefill: PrefillNode | None = None

    async def setup(self, *, tokenizer: str) -> dict[str, Any]:
        if self._role == "idle":
            return {}
        layout = build_layout([("k", "uint8", (8,))], page_size=1, num_pages=PAGES)
        pool = await asyncio.to_thread(PagedPool.allocate, layout)
        plane = await asyncio.to_thread(open_plane, "local", pool.segment, None)
        card = ModelCard(
            path=tokenizer, name="stalls", context_length=CONTEXT, vocab_size=VOCABULARY
        )
        bootstrap_port = rank = None
        allow_many_connections()
        service: Any
        if self._role == "prefill":
            prefill = self._prefill = PrefillNode(pool, plane)
            await prefill.start()
            rank = rank_to_json(prefill.info)
            self._stack.push_async_callback(prefill.close)
            bootstrap = bound_socket("127.0.0.1", 0, "--port")
            bootstrap_port = bootstrap.getsockname()[1]
            registry = registry_app(RankTable(), RoleMetrics())
            await self._stack.enter_async_context(listening_on(registry, bootstrap))
            await RegistryClient().register(f"127.0.0.1:{bootstrap_port}", prefill.info)
            service = PrefillService(
                card,
                prefill,
                ReadyPrefill(pool),  # type: ignore[arg-type]
                60.0,
            )
        else:
            decode = DecodeNode(pool, plane, resolve=RegistryClient().resolve)
            await decode.start()
            self._stack.push_async_callback(decode.close)
            service = DecodeService(card, decode, PacedDecode(pool), 60.0)  # type: ignore[arg-type]
        port = await self._listen(service, tokenizer)
        return {"port": port, "bootstrap_port": bootstrap_port, "rank": rank}

    async def connections(self) -> dict[str, Any]:
        assert self._prefill is not None
        socket = self._prefill.shell.socket
        return {"count": len(socket.connections.open) if isinstance(socket, ZmqSocket) else 0}

    async def announced(self, *, count: int) -> dict[str, Any]:
        assert self._prefill is not None
        found = self._prefill.shell.endpoint.core.rendezvous.announced
        await until(lambda: len(found) == count, PATIENCE_S)
        return {}

    async def announce(self, *, count: int, rank: dict[str, Any]) -> dict[str, Any]:
        """Start a decode, and announce `count` rooms of one token to prefill `rank`."""
        layout = build_layout([("k", "uint8", (8,))], page_size=1, num_pages=PAGES)
        pool = await asyncio.to_thread(PagedPool.allocate, layout)
        node = DecodeNode(pool, await asyncio.to_thread(open_plane, "local", pool.segment, None))
        await node.start()
        self._stack.push_async_callback(node.close)
        ranks = [rank_from_json(rank)]
        # Other cases number their rooms from 1, so these numbers start far above them.
        for room in range(1 << 32, (1 << 32) + count):
            node.announce(room, ranks, [1])
            if room % 32 == 0:
                await asyncio.sleep(0)
        return {}

    async def _listen(self, service: Any, tokenizer: str) -> int:
        # The import takes seconds, and the idle process needs no tokenizer.
        from transformers import PreTrainedTokenizerFast

        text = await asyncio.to_thread(PreTrainedTokenizerFast, tokenizer_file=tokenizer)
        metrics = RoleMetrics(service.report, role=self._role)
        pipeline = CompletionPipeline(service, ThreadedTokenizer(text, CONTEXT), metrics)
        app = build_app([*generate.routes(pipeline), *openai.routes(pipeline)], metrics)
        made = bound_socket("127.0.0.1", 0, "--port")
        await self._stack.enter_async_context(listening_on(app, made))
        port: int = made.getsockname()[1]
        return port

    async def watch(self) -> dict[str, Any]:
        # As in a role, frozen objects and a short switch interval shorten stalls.
        gc.freeze()
        sys.setswitchinterval(0.001)
        self._ticker = StallTicker()
        return {}

    async def watched(self) -> dict[str, Any]:
        assert self._ticker is not None
        late_s = self._ticker.late_s
        p50 = round(float(np.percentile(late_s or [0.0], 50)) * 1e3, 3)
        return {"ticks": len(late_s), "late_p50_ms": p50, **self._ticker.stalls()}

    async def close(self) -> None:
        await self._stack.aclose()


if __name__ == "__main__":
    uvloop.run(serve(StallsWorker(sys.argv[1])))
