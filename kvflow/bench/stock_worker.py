"""The process that completes prompts with stock transformers' `generate`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvflow.aio import Threads
from kvflow.bench.child import serve
from kvflow.serve.demo.stock import complete, load_stock


class StockCommands:
    def __init__(self) -> None:
        self._model: Any = None
        self._thread = Threads("stock-model")

    async def setup(self, model: str, threads: int) -> dict[str, Any]:
        def load() -> dict[str, Any]:
            import torch

            torch.set_num_threads(threads)
            self._model = load_stock(model)
            return {"dtype": str(self._model.dtype).removeprefix("torch.")}

        return await self._run(load)

    async def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Complete prompts of one length as one greedy batch. Return the seconds and the tokens."""

        def run() -> dict[str, Any]:
            begun = time.perf_counter()
            tokens = complete(self._model, prompts, new_tokens)
            return {"seconds": time.perf_counter() - begun, "tokens": tokens}

        return await self._run(run)

    async def _run(self, work: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._thread.run(work)
        return found

    async def close(self) -> None:
        self._thread.close()


if __name__ == "__main__":
    asyncio.run(serve(StockCommands()))
