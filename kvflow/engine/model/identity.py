"""Which model this is: a line that prefill and decode compare when they register, since KV of two models never fits."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PretrainedConfig

SAMPLED = 64  # values of each weight, spread evenly: another fine-tune of the same shapes differs in some of them
_TENSOR_PARALLEL = 1  # the engines run whole models
# What config.json tells about its file, about generation and about training; none of it changes the KV of a prompt.
# The dtype is compared as it was loaded.
_IRRELEVANT = frozenset(
    {
        *("_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map"),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "id2label",
            "label2id",
            "initializer_range",
            "attention_dropout",
        ),
        *("hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "output_attentions", "output_hidden_states"),
    }
)


def fingerprint(name: str, model: Any, dtype: str) -> str:
    """The model's identity, whatever its path: architecture and size to be read, config and weights as digests."""
    text = model.config.get_text_config()
    config, _ = PretrainedConfig.get_config_dict(name)
    what = (model.config.architectures or [type(model).__name__])[0]
    layers, hidden = getattr(text, "num_hidden_layers", "?"), getattr(text, "hidden_size", "?")
    return (
        f"{what[:80]} {layers}x{hidden} {dtype} tp{_TENSOR_PARALLEL}"
        f" config {config_digest(config)} weights {weights_digest(model)}"
    )


def config_digest(config: dict[str, Any]) -> str:
    """8 hex digits over what matters in a config.json, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(_relevant(config), sort_keys=True, default=str).encode()).hexdigest()[:8]


def weights_digest(model: Any) -> str:
    """12 hex digits over name, shape and `SAMPLED` values of every weight: milliseconds, however large the model is."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters(), key=lambda item: str(item[0])):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        flat = weight.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLED)
        digest.update(flat[::step][:SAMPLED].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _relevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _relevant(inner) for key, inner in value.items() if key not in _IRRELEVANT}
    return value
