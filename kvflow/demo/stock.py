"""The reference: stock transformers `generate`, greedy, one prompt at a time, in a process without kvflow's engine.

Reads one `Question` as JSON from stdin, writes the lists of new token ids to stdout.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec


class Question(msgspec.Struct):
    model: str
    dtype: str
    prompts: list[str]
    new_tokens: int


def main() -> None:
    """Answer one question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    tokenizer: Any = AutoTokenizer.from_pretrained(question.model)
    model: Any = AutoModelForCausalLM.from_pretrained(question.model, dtype=getattr(torch, question.dtype)).eval()
    model.generation_config.eos_token_id = None  # ignore_eos: nothing ends a completion but its length
    model.generation_config.pad_token_id = 0
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt in question.prompts:
            ids = torch.tensor([tokenizer.encode(prompt)])
            made = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=question.new_tokens,
            )
            answers.append(made[0, ids.shape[1] :].tolist())
    sys.stdout.buffer.write(msgspec.json.encode(answers))


if __name__ == "__main__":
    main()
