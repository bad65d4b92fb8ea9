"""The process that completes prompts with stock transformers' `generate`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvflow.aio import Threads
from kvflow.bench.child import serve


class StockCommands:
    """The commands: setup, generate."""

    def __init__(self) -> None:
        self._model: Any = None
        self._thread = Threads("stock-model")

    async def setup(self, model: str, threads: int) -> dict[str, Any]:
        def load() -> dict[str, Any]:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            torch.set_num_threads(threads)
            found: Any = AutoModelForCausalLM.from_pretrained(model).eval()
            # Like `ignore_eos` at kvflow: only its length ends a completion.
            found.generation_config.eos_token_id = None
            found.generation_config.pad_token_id = 0
            self._model = found
            return {"dtype": str(found.dtype).removeprefix("torch.")}

        return await self._run(load)

    async def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """Complete all prompts, which have one length, as one greedy batch; return the seconds and
        the tokens.
        """

        def run() -> dict[str, Any]:
            import torch

            ids = torch.tensor(prompts)
            begun = time.perf_counter()
            with torch.inference_mode():
                out = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    num_beams=1,
                    max_new_tokens=new_tokens,
                )
            return {
                "seconds": time.perf_counter() - begun,
                "tokens": out[:, ids.shape[1] :].tolist(),
            }

        return await self._run(run)

    async def _run(self, work: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._thread.run(work)
        return found

    async def close(self) -> None:
        self._thread.close()


if __name__ == "__main__":
    asyncio.run(serve(StockCommands()))
