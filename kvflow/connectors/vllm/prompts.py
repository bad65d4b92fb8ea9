"""The prompt on which a room's halves must agree. It covers everything that the KV depends on."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from kvflow.connectors.vllm.messages import Prompt


def prompt_of(request: Any) -> Prompt:
    """Return the token ids of a vLLM request, uint32 [n].

    A LoRA adapter and media change the KV cache, but not the ids: media appear there only as
    placeholders. So a digest of the adapter and the media is mixed into the first id. Halves with
    different adapters or media then do not match.
    """
    ids = np.array(request.prompt_token_ids, np.uint32)
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    media = [feature.identifier for feature in request.mm_features or ()]
    if adapter or media:
        ids[0] ^= np.frombuffer(sha256(repr((adapter, media)).encode()).digest()[:4], np.uint32)[0]
    return ids
