"""Tiny random models of many families, for token parity.

The initializer range is large and Gemma's embeddings are untied: with small weights a random model
repeats one token forever, and parity would mean nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvflow.serve.engine.model.load import LoadedModel

# What the fixtures of these models are: see conftest.py.
Tiny = Callable[[str], Path]
Loaded = Callable[..., LoadedModel]
Stock = Callable[[str], Any]
Expected = Callable[[list[int]], list[int]]


BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MLA: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ALTERNATING,
}
GPT2: dict[str, Any] = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
}
KV_SHARED: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
}

Family = tuple[str, dict[str, Any]]


def family(model_type: str, *parts: dict[str, Any], **changes: Any) -> Family:
    values = dict(BASE)
    for part in (*parts, changes):
        values |= part
    return model_type, values


# The families the project promises, then others that reach a corner of their own.
FAMILIES: dict[str, Family] = {
    "llama": family("llama"),
    "qwen3": family("qwen3", head_dim=16),
    "mistral": family("mistral", sliding_window=16),
    "gemma2": family("gemma2", GEMMA),
    "gemma3": family("gemma3_text", GEMMA),
    "gpt2": ("gpt2", GPT2),
    "mixtral": family("mixtral", num_local_experts=4),
    "deepseek_v2": family("deepseek_v2", MLA),
    "deepseek_v3": family("deepseek_v3", MLA),
}
WINDOWED: dict[str, Any] = {"head_dim": 16, "sliding_window": 16, "layer_types": ALTERNATING}
CORNERS: dict[str, Family] = {
    "gpt_oss": family("gpt_oss", WINDOWED, num_local_experts=4),
    "gemma4_shared_kv": family("gemma4_text", WINDOWED, KV_SHARED, global_head_dim=32),
    "llama4_chunked": family(
        "llama4_text",
        head_dim=16,
        attention_chunk_size=16,
        num_local_experts=2,
        intermediate_size_mlp=128,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
    ),
    "bloom": (
        "bloom",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "n_layer": 4,
            "n_head": 4,
            "initializer_range": 0.3,
            "eos_token_id": None,
        },
    ),
    "opt": family("opt", ffn_dim=128, word_embed_proj_dim=64),
}
SSM: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
PURE = {
    name: BASE[name]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")
}
# As real models have them: with few heads many index scores are exactly 0, and which of equal ones
# are taken depends on how many keys there are. All of them are 0 for the padding token, whose
# embedding is 0, so there is none.
INDEXER = {"index_topk": 8, "index_n_heads": 32, "index_head_dim": 16, "pad_token_id": None}

# Families that keep an indexer's keys, and those that keep states per request.
INDEXED: dict[str, Family] = {
    "deepseek_v32": family("deepseek_v32", MLA, INDEXER),
    "glm_moe_dsa": family("glm_moe_dsa", MLA, INDEXER),
}
STATEFUL: dict[str, Family] = {
    "qwen3_next": family("qwen3_next", LINEAR, MOE),
    "falcon_h1": family("falcon_h1", SSM, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4),
    "lfm2": family(
        "lfm2",
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        block_ff_dim=128,
        block_auto_adjust_ff_dim=False,
    ),
    "bamba": family("bamba", SSM, attn_layer_indices=[1, 3]),
    "jamba": family(
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    "nemotron_h": family(
        "nemotron_h",
        head_dim=16,
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        conv_kernel=4,
        expand=2,
        chunk_size=16,
    ),
    "mamba2": (
        "mamba2",
        {
            **PURE,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "eos_token_id": None,
        },
    ),
}
MORE_STATEFUL: dict[str, Family] = {
    "granitemoehybrid": family(
        "granitemoehybrid",
        SSM,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        position_embedding_type="rope",
    )
}
REFUSED: dict[str, Family] = {
    "minimax": family(
        "minimax",
        head_dim=16,
        num_local_experts=4,
        block_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    )
}
ALL = {**FAMILIES, **CORNERS, **INDEXED, **STATEFUL, **MORE_STATEFUL, **REFUSED}


def build(family: str, directory: Path, **changes: Any) -> Path:
    """Write the family's random model, with `changes`, to `directory` once; return its path."""
    target = directory / (
        f"{family}-{zlib.crc32(repr(changes).encode()):08x}" if changes else family
    )
    if (target / "config.json").is_file():
        return target
    model_type, values = ALL[family]
    torch.manual_seed(1234)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **{**values, **changes})
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "weight" in name and ("norm" in name or "ln" in name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "sink" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() >= 2 and float(parameter.std()) < 0.1:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.eos_token_id = None
    model.save_pretrained(target)
    return target


def load_stock(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def generate(stock: Any, prompt: list[int], count: int, **options: Any) -> list[int]:
    """Return `count` tokens of `model.generate`, greedy, unless `options` end it earlier."""
    ids = torch.tensor([prompt])
    given = {"min_new_tokens": count, "eos_token_id": None, **options}
    out = stock.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        **given,
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


@torch.inference_mode()
def would_generate(stock: Any, prompt: list[int], draft: Sequence[int]) -> bool:
    """True if `stock` ranks each token of `draft` first after those before it.

    `generate` then returns `draft`. One forward pass finds that out; `generate` takes one for each
    token, and those were most of what the tests of parity took."""
    logits = stock(torch.tensor([[*prompt, *draft[:-1]]]), use_cache=False).logits
    ranked: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return ranked == list(draft)


class Generated:
    """Tokens that the tiny models generate without kvflow, greedy; each prompt is asked once."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._found: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def __call__(
        self, family: str, prompt: list[int], count: int, draft: Sequence[int] = ()
    ) -> list[int]:
        """Return `count` tokens. `draft` is a guess: a right one makes the answer cheap."""
        key, model = (family, tuple(prompt)), self._stock(family)
        if len(self._found.get(key, [])) < count:
            guessed = len(draft) == count and would_generate(model, prompt, draft)
            self._found[key] = [*draft] if guessed else generate(model, prompt, count)
        return self._found[key][:count]
