"""The reference of the demo: stock transformers `generate`, greedy, one prompt at a time.

It runs in a process without kvflow's engine, reads one `ReferenceRequest` as JSON from stdin, and
writes the lists of new token ids to stdout.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec


class ReferenceRequest(msgspec.Struct):
    """Prompts to complete with stock transformers."""

    model: str
    dtype: str
    prompts: list[str]
    new_tokens: int


def main() -> None:
    """Complete the prompts of one request."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ReferenceRequest)
    tokenizer: Any = AutoTokenizer.from_pretrained(request.model)
    model: Any = AutoModelForCausalLM.from_pretrained(
        request.model, dtype=getattr(torch, request.dtype)
    ).eval()
    # The requests to kvflow have `ignore_eos`: only the length ends a completion.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    completions: list[list[int]] = []
    with torch.inference_mode():
        for prompt in request.prompts:
            ids = torch.tensor([tokenizer.encode(prompt)])
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=request.new_tokens,
            )
            completions.append(output[0, ids.shape[1] :].tolist())
    sys.stdout.buffer.write(msgspec.json.encode(completions))


if __name__ == "__main__":
    main()
