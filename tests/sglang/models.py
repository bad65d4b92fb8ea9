"""Tiny models with random weights, of the families that SGLang computes on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm import models

_RANDOM = {"initializer_range": 0.12}
_GATED = {"intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64, **_RANDOM}
_MLA = {
    "intermediate_size": 512,
    "num_key_value_heads": 4,
    "kv_lora_rank": 96,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    **_RANDOM,
}
WINDOW = 128
# The class of each family's configuration, and its fields.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": models.FAMILIES["llama"],
    "qwen3": models.FAMILIES["qwen3"],
    # MLA: one buffer a layer. SGLang asks for a scaled rope in one with DeepSeek's attention.
    "minicpm3": (
        "MiniCPM3Config",
        {**_MLA, "scale_emb": 1, "scale_depth": None, "dim_model_base": None},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_MLA,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 4,
            "moe_layer_freq": 1,  # in the published configurations, and not in transformers' own
            "num_mtp_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    # Two layers of full attention and two with a window, whose pages are a space of their own.
    "mellum": (
        "MellumConfig",
        {
            **_GATED,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] * 4,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Its attention keeps the state of a convolution, in rows beside the pages.
    "zaya": (
        "ZayaConfig",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "router_hidden_size": 64,
            "tie_word_embeddings": True,
            **_RANDOM,
        },
    ),
}


def words_of(family: str, page: int) -> list[str]:
    """Return what a SGLang server needs on its command line for a family."""
    if family != "zaya":
        return []
    # "no_buffer only supports page_size=1", says SGLang: without its radix cache all do.
    words = ["--max-mamba-cache-size", "64"]
    return words if page == 1 else [*words, "--disable-radix-cache"]


def make_model(family: str, folder: Path, seed: int = 7, *, longest: int = models.LONGEST) -> Path:
    """Write one into `folder`, in float32, which is returned. It takes `longest` tokens."""
    if family != "zaya":
        return models.write_model(*FAMILIES[family], folder, seed, longest=longest)
    models.write_tokenizer(folder)
    _save_zaya(new_model(family, seed, longest=longest), folder)
    return folder


def new_model(family: str, seed: int = 7, *, longest: int = models.LONGEST) -> Any:
    """Return the model as transformers computes it."""
    import torch

    found = models.new_model(*FAMILIES[family], seed, longest=longest)
    if family == "zaya":
        # As transformers makes them these are zero, and then attention does not look at its keys.
        for layer in found.model.layers:
            torch.nn.init.uniform_(layer.self_attn.qk_norm.temp, 0.5, 1.5)
    return found


def greedy_answer(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers finds the most probable, step by step."""
    import torch

    with torch.inference_mode():
        step = model(torch.tensor([prompt]), use_cache=True)
        found: list[int] = []
        while True:
            found.append(int(step.logits[0, -1].argmax()))
            if len(found) == count:
                return found
            last = torch.tensor([[found[-1]]])
            step = model(last, past_key_values=step.past_key_values, use_cache=True)


# SGLang reads the names of the first checkpoints, in which a layer of transformers is two layers.
_ATTENTION = {
    "input_layernorm": "input_norm",
    "self_attn.o_proj": "self_attn.o_proj",
    "self_attn.qk_norm.temp": "self_attn.qkv.temp",
    "self_attn.qkv_proj.q_proj": "self_attn.qkv.linear_q",
    "self_attn.qkv_proj.k_proj": "self_attn.qkv.linear_k",
    "self_attn.qkv_proj.v_proj_current": "self_attn.qkv.val_proj1",
    "self_attn.qkv_proj.v_proj_delayed": "self_attn.qkv.val_proj2",
    "self_attn.qkv_proj.conv_qk_depthwise": "self_attn.qkv.conv_qk.0",
    "self_attn.qkv_proj.conv_qk_grouped": "self_attn.qkv.conv_qk.1",
}
_EXPERTS = {
    "post_attention_layernorm": "input_norm",
    "post_attention_residual_scale": "res_scale",
    "mlp.gate.down_proj": "zaya_block.router.down_proj",
    "mlp.gate.router_states_scale": "zaya_block.router.router_states_scale",
    "mlp.gate.balancing_biases": "zaya_block.router.balancing_biases",
    "mlp.gate.router_mlp.norm": "zaya_block.router.rmsnorm_eda",
    "mlp.gate.router_mlp.fc1": "zaya_block.router.router_mlp.0",
    "mlp.gate.router_mlp.fc2": "zaya_block.router.router_mlp.2",
    "mlp.gate.router_mlp.out_proj": "zaya_block.router.router_mlp.4",
}


def _save_zaya(model: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    config, found = model.config, {}
    for name, tensor in model.state_dict().items():
        for new, value in _zaya_weights(name, tensor, config.num_hidden_layers):
            found[new] = value.detach().clone().contiguous()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "num_hidden_layers": 2 * config.num_hidden_layers,
        "num_query_groups": config.num_key_value_heads,
        "ffn_hidden_size": 2 * config.moe_intermediate_size,
        "zaya_mlp_expansion": config.router_hidden_size,
        "norm_epsilon": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["hybrid"]["rope_theta"],
        "partial_rotary_factor": config.rope_parameters["hybrid"]["partial_rotary_factor"],
        "torch_dtype": "float32",
    }
    for name in (
        *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("num_experts", "max_position_embeddings", "cca_time0", "cca_time1"),
        *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    ):
        fields[name] = getattr(config, name)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))


def _zaya_weights(name: str, tensor: Any, layers: int) -> list[tuple[str, Any]]:
    """Return the tensors of a tensor of transformers, with the names that SGLang reads."""
    if not name.startswith("model.layers."):
        renamed = {
            "model.embed_tokens.weight": "model.embed_tokens.weight",
            "model.norm.weight": "model.final_norm.weight",
            "model.input_hidden_states_scale": "model.layers.0.res_scale.hidden_states_scale",
            "model.input_hidden_states_bias": "model.layers.0.res_scale.hidden_states_bias",
        }
        return [(renamed[name], tensor)] if name in renamed else []
    number, rest = name.removeprefix("model.layers.").split(".", 1)
    first = 2 * int(number)
    if rest.startswith("post_mlp_residual_scale."):
        owner = "model" if int(number) == layers - 1 else f"model.layers.{first + 2}"
        return [(f"{owner}.res_scale.{rest.rpartition('.')[2]}", tensor)]
    for parts, layer in ((_ATTENTION, first), (_EXPERTS, first + 1)):
        for old, new in parts.items():
            if rest == old or rest.startswith(f"{old}."):
                return [(f"model.layers.{layer}.{new}{rest.removeprefix(old)}", tensor)]
    kind = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}[rest.rpartition(".")[2]]
    owner = f"model.layers.{first + 1}.zaya_block.experts.local_experts"
    return [(f"{owner}.{n}.{kind}.weight", each) for n, each in enumerate(tensor)]
