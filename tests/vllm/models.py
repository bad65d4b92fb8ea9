"""Tiny models with random weights, as vLLM serves them, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
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


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **_COMMON, intermediate_size=512, num_key_value_heads=2, head_dim=64, initializer_range=0.12
    )


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        **_COMMON, intermediate_size=512, num_key_value_heads=2, head_dim=64, initializer_range=0.12
    )


def _opt() -> Any:
    from transformers import OPTConfig

    return OPTConfig(**_COMMON, ffn_dim=512, word_embed_proj_dim=256, init_std=0.12)


def _gpt_neox() -> Any:
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(**_COMMON, intermediate_size=512, initializer_range=0.12)


def _deepseek_v2() -> Any:
    """With MLA, in which vLLM does not go on from a cached beginning on a CPU."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **_COMMON,
        intermediate_size=512,
        moe_intermediate_size=64,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        first_k_dense_replace=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        initializer_range=0.12,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "opt": _opt,
    "gpt_neox": _gpt_neox,
    "deepseek_v2": _deepseek_v2,
}


def make_model(family: str, folder: Path, seed: int = 7) -> Path:
    """Write one into `folder`, in float32, which is returned."""
    import torch
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (DEMO_MODEL_DIR / name).exists():
            shutil.copy(DEMO_MODEL_DIR / name, folder / name)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).save_pretrained(
        folder
    )
    return folder
