"""The identity of a model.

Prefill and decode compare identities when they register, because one model cannot use the KV of
another.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from kvflow.model_files import config_digest, weights_digest


def fingerprint(name: str, model: Any, dtype: str) -> str:
    """Return the model's identity, which does not depend on its path.

    It states the architecture and the size in plain text, followed by digests of the configuration
    and of the weights. The weights are read from the model's files, so every part of a model has
    the same identity.

    Raises: MisuseError if the weights cannot be read.
    """
    text = model.config.get_text_config()
    config, _ = PretrainedConfig.get_config_dict(name)
    what = (model.config.architectures or [type(model).__name__])[0]
    layers, hidden = getattr(text, "num_hidden_layers", "?"), getattr(text, "hidden_size", "?")
    return (
        f"{what[:80]} {layers}x{hidden} {dtype} config {config_digest(config)} weights "
        f"{weights_digest(name)}"
    )
