"""The hashes of the blocks in a request's prompts. Cache events name blocks by the same hashes.

The hashes cover tokens. The body has the token ids, or a text that the router can encode only with
the model's tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from kvflow.http.prompt_fields import PromptIds, namespace_of, template_variables
from kvflow.protocols.cache.hashes import (
    TOKEN_BYTES,
    Namespace,
    chain_root,
    event_hash,
    page_hashes,
    token_bytes,
)
from kvflow.router.blocks import BlockHashes
from kvflow.router.prompts import PromptFields

# The longest text that the router encodes: some 250,000 tokens, which take 200 ms in a thread.
MAX_CHARACTERS = 1 << 20
_STEP_BYTES, _STEP_BLOCKS = 1 << 16, 1 << 10  # hashed between two turns of the loop, in some 400 us


class Encoder(Protocol):
    """The part of the model's tokenizer that prompts need (kvflow.serve.http.tokenizer)."""

    async def encode(self, text: str, *, param: str, add_special_tokens: bool) -> PromptIds: ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        tools: Sequence[dict[str, Any]] = (),
    ) -> PromptIds: ...


async def block_hashes(
    fields: PromptFields, sizes: Collection[int], encoder: Encoder | None
) -> dict[int, list[BlockHashes]]:
    """Return the hashes of each prompt's whole blocks, for each of these block sizes.

    The result is empty if the tokens are unknown, or if a worker will refuse the body.
    """
    if not sizes:
        return {}
    try:
        prompts = [token_bytes(ids) for ids in await _token_ids(fields, encoder)]
        roots = [chain_root(_namespace(fields, i, len(prompts))) for i in range(len(prompts))]
    # A malformed body can raise any error. A worker refuses it with a better message.
    except Exception:  # noqa: BLE001
        return {}
    if not prompts:
        return {}
    return {
        size: [
            await _hashes(tokens, size, root) for tokens, root in zip(prompts, roots, strict=True)
        ]
        for size in set(sizes)
    }


async def _token_ids(fields: PromptFields, encoder: Encoder | None) -> list[Any]:
    """Return the token ids of each prompt, or an empty list if some are unknown."""
    if fields.messages is not None:
        tools = fields.template_tools or ()
        # Only a worker can make a chat of Anthropic's body.
        if fields.system is not None or not all("function" in tool for tool in tools):
            return []
        if encoder is None or not isinstance(fields.messages, list):
            return []
        if sum(len(str(one)) for one in (*fields.messages, *tools)) > MAX_CHARACTERS:
            return []
        variables = template_variables(fields)
        return [await encoder.encode_chat(fields.messages, variables, tools)]
    found = []
    for prompt in fields.prompts():
        if not isinstance(prompt, str):
            found.append(prompt)
        elif encoder is None or len(prompt) > MAX_CHARACTERS:
            return []
        else:
            special = fields.add_special_tokens is not False
            found.append(await encoder.encode(prompt, param="prompt", add_special_tokens=special))
    return found


def _namespace(fields: PromptFields, index: int, prompts: int) -> Namespace:
    parts = []
    for value in (fields.cache_salt, fields.extra_key):
        one = value[index] if isinstance(value, list) and len(value) == prompts else value
        if one is not None and not isinstance(one, str):
            raise ValueError("neither a text nor one for each prompt")
        parts.append(one or "")
    return namespace_of(*parts)


async def _hashes(tokens: bytes, size: int, previous: bytes) -> BlockHashes:
    """Return the hashes of whole blocks of `size` tokens. The loop runs between the steps."""
    step = max(1, min(_STEP_BYTES // (size * TOKEN_BYTES), _STEP_BLOCKS)) * size * TOKEN_BYTES
    found: BlockHashes = []
    for at in range(0, len(tokens), step):
        digests = page_hashes(tokens[at : at + step], size, previous)
        if digests:
            previous = digests[-1]
            found += map(event_hash, digests)
        await asyncio.sleep(0)
    return found
