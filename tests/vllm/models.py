"""Tiny models with random weights, as vLLM serves them, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kvflow.serve.demo_model import DEMO_MODEL_DIR

LONGEST = 2304  # tokens of a prompt and its answer
VOCABULARY = 4096  # the tokenizer's, and a little more
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


_GATED = {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
# The class of each family's configuration, and its fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GATED, "initializer_range": 0.12}),
    "qwen3": ("Qwen3Config", {**_GATED, "initializer_range": 0.12}),
    "opt": ("OPTConfig", {"ffn_dim": 512, "word_embed_proj_dim": 256, "init_std": 0.12}),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 512, "initializer_range": 0.12}),
    # With MLA, in which vLLM does not go on from a cached beginning on a CPU.
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            "intermediate_size": 512,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "first_k_dense_replace": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "initializer_range": 0.12,
        },
    ),
}


def make_model(family: str, folder: Path, seed: int = 7, *, longest: int = LONGEST) -> Path:
    """Write one into `folder`, in float32, which is returned. It takes `longest` tokens."""
    import torch
    import transformers

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (DEMO_MODEL_DIR / name).exists():
            shutil.copy(DEMO_MODEL_DIR / name, folder / name)
    torch.manual_seed(seed)
    kind, fields = FAMILIES[family]
    config = getattr(transformers, kind)(
        **{**_COMMON, "max_position_embeddings": longest}, **fields
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
