"""The identity of a model: a line that prefill and decode compare when they register, since KV of
two models never fits.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from kvflow.model_files import config_digest, weights_digest


def fingerprint(name: str, model: Any, dtype: str) -> str:
    """Return the model's identity, whatever its path.

    It has the architecture and the size in plain text, and the config and the weights as digests.
    The weights are those in the model's files, so that every part of a model has the identity of
    the whole.

    Raises: MisuseError.
    """
    text = model.config.get_text_config()
    config, _ = PretrainedConfig.get_config_dict(name)
    what = (model.config.architectures or [type(model).__name__])[0]
    layers, hidden = getattr(text, "num_hidden_layers", "?"), getattr(text, "hidden_size", "?")
    return (
        f"{what[:80]} {layers}x{hidden} {dtype} config {config_digest(config)} weights "
        f"{weights_digest(name)}"
    )
