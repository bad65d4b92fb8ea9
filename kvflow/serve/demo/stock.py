"""The demo's reference: `generate` of stock transformers, greedy, one prompt at a time.

It runs in a process without kvflow's engine. It reads one `ReferenceRequest` as JSON from stdin,
and writes the lists of new token ids as JSON to stdout.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec


class ReferenceRequest(msgspec.Struct):
    model: str
    dtype: str
    prompts: list[str]
    new_tokens: int


def load_stock(path: str, **how: Any) -> Any:
    """Load the model at `path` with the options `how`, and make it ignore the end token."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(path, **how).eval()
    # The demo's requests set `ignore_eos`, so only the length may end a completion here too.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def complete(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Complete `prompts`, which must have the same length, greedily in one batch."""
    import torch

    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=1,
            max_new_tokens=new_tokens,
        )
    found: list[list[int]] = output[:, ids.shape[1] :].tolist()
    return found


def main() -> None:
    """Complete the prompts of one request, from stdin to stdout."""
    import torch
    from transformers import AutoTokenizer

    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ReferenceRequest)
    model = load_stock(request.model, dtype=getattr(torch, request.dtype))
    tokenizer: Any = AutoTokenizer.from_pretrained(request.model)
    completions = [
        complete(model, [tokenizer.encode(prompt)], request.new_tokens)[0]
        for prompt in request.prompts
    ]
    sys.stdout.buffer.write(msgspec.json.encode(completions))


if __name__ == "__main__":
    main()
