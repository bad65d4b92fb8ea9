"""The prompt on which a room's halves must agree. It covers all that its KV cache depends on."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

from kvflow.connectors.vllm.messages import Prompt


def prompt_of(request: Any) -> Prompt:
    """Return the token ids of a vLLM request, uint32 [n].

    An adapter and media change the KV cache but not the ids, in which media appear only as
    placeholders. Their digest is therefore mixed into the first id, so that halves with different
    adapters or media do not match.
    """
    ids = np.array(request.prompt_token_ids, np.uint32)
    adapter = request.lora_request.lora_name if request.lora_request is not None else ""
    media = [feature.identifier for feature in request.mm_features or ()]
    if adapter or media:
        ids[0] ^= np.frombuffer(sha256(repr((adapter, media)).encode()).digest()[:4], np.uint32)[0]
    return ids
