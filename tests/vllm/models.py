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
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
_WINDOW = 100  # tokens, not a whole number of blocks
_FEW_EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
# The class of each family's configuration, and its fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GATED, "initializer_range": 0.12}),
    # Its pages have 32 KB a token, so that a transfer takes a while.
    "llama_wide": (
        "LlamaConfig",
        {**_GATED, "num_key_value_heads": 4, "head_dim": 256, "initializer_range": 0.12},
    ),
    "qwen3": ("Qwen3Config", {**_GATED, "initializer_range": 0.12}),
    "opt": ("OPTConfig", {"ffn_dim": 512, "word_embed_proj_dim": 256, "init_std": 0.12}),
    "gpt_neox": ("GPTNeoXConfig", {"intermediate_size": 512, "initializer_range": 0.12}),
    # A sliding window in some layers, and full attention in the others.
    "gemma3": (
        "Gemma3TextConfig",
        {**_GATED, "sliding_window": _WINDOW, "layer_types": _WINDOWS, "initializer_range": 0.12},
    ),
    "olmo3": (
        "Olmo3Config",
        {**_GATED, "sliding_window": _WINDOW, "layer_types": _WINDOWS, "initializer_range": 0.12},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_GATED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": _WINDOW,
            "layer_types": _WINDOWS,
            "initializer_range": 0.12,
        },
    ),
    # A sliding window in every layer.
    "mistral": ("MistralConfig", {**_GATED, "sliding_window": _WINDOW, "initializer_range": 0.12}),
    # States in most layers, and full attention in one.
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_GATED,
            **_FEW_EXPERTS,
            "layer_types": _HYBRID,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 4,
            "initializer_range": 0.12,
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            "intermediate_size": 512,
            "shared_intermediate_size": 512,
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "initializer_range": 0.12,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **_GATED,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_expand": 1,
            "initializer_range": 0.12,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            "conv_L_cache": 3,
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "initializer_range": 0.12,
        },
    ),
    "jamba": (
        "JambaConfig",
        {
            "intermediate_size": 512,
            "num_key_value_heads": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 16,
            "use_mamba_kernels": False,
            "initializer_range": 0.12,
        },
    ),
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
    return write_model(*FAMILIES[family], folder, seed, longest=longest)


def write_model(
    kind: str, fields: dict[str, Any], folder: Path, seed: int, *, longest: int = LONGEST
) -> Path:
    """Write a model of a class of configurations with `fields`, as `make_model` does."""
    write_tokenizer(folder)
    new_model(kind, fields, seed, longest=longest).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (DEMO_MODEL_DIR / name).exists():
            shutil.copy(DEMO_MODEL_DIR / name, folder / name)


def new_model(kind: str, fields: dict[str, Any], seed: int, *, longest: int = LONGEST) -> Any:
    """Return a model with random weights, in float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, kind)(
        **{**_COMMON, "max_position_embeddings": longest, **fields}
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
