"""A model whose decode steps, like those on accelerators, cost about the same for any batch.

It is deep and very narrow: on a CPU, launching its many small kernels takes longer than the
arithmetic in them. Its weights are random and its tokens have no meaning, so it is useful only for
timings.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from kvflow.serve.demo_model import DEMO_MODEL_DIR

LAYERS, WIDTH, HEAD_DIM, VOCABULARY_SIZE, CONTEXT_TOKENS = 16, 32, 8, 4096, 4096


def build_fixed_cost_model(directory: Path) -> None:
    """Write the model to `directory`, with the demo model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT_TOKENS,
        # The weights are larger than usual, or the random model would always repeat one token.
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    # The seed makes all runs use the same weights. The fork leaves the caller's generator alone.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO_MODEL_DIR / name, directory / name)
