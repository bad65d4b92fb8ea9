"""The attention function `kvflow`: scaled dot product attention over one packed row, one sequence after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from kvflow.engine.model.step import Span, Step, current

NAME = "kvflow"


class WindowRecorder:
    """For the self-test: the sliding window that each layer passed (0: none); None while nothing is recorded."""

    windows: dict[int, int] | None = None


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, tokens, dim] and `key`/`value` [1, kv heads, keys, dim] are divided by the step's spans.

    Keys outside every span are never read. `dropout` and `attention_mask` belong to transformers' call, and are unused.
    """
    step = current.step
    if step is None:
        raise RuntimeError("the attention function kvflow was called outside a step of kvflow's runner")
    window = sliding_window or 0
    if WindowRecorder.windows is not None:
        WindowRecorder.windows[getattr(module, "layer_idx", -1)] = window
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for span in step.spans:
        q = query[:, :, span.q0 : span.q1]
        first = max(span.k0, span.k1 - window) if window and span.q1 - span.q0 == 1 else span.k0
        k, v = key[:, :, first : span.k1], value[:, :, first : span.k1]
        if softcap or s_aux is not None:
            attended = _plain(step, q, k, v, scaling, window, softcap, s_aux)
        elif span.q1 - span.q0 == 1:
            attended = _one_query(q, k, v, scaling)
        else:
            attended = _many_queries(step, span, q, k, v, scaling, window)
        out[:, span.q0 : span.q1] = attended.transpose(1, 2)
    return out, None


def _one_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Decode: the heads of a group become queries of one head, so no key has to be repeated."""
    folded = q.reshape(1, k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(folded, k, v, scale=scaling).reshape(1, -1, 1, v.shape[-1])


def _many_queries(
    step: Step, span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int
) -> torch.Tensor:
    queries, keys = span.q1 - span.q0, span.k1 - span.k0
    causal = queries == keys and not (window and keys > window)
    mask = None if causal else step.mask(queries, keys, window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped)


def _plain(
    step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int,
    softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Soft-capped scores and attention sinks, for which there is no CPU kernel."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    queries, keys = q.shape[2], k.shape[2]
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if queries > 1:
        scores = scores.masked_fill(~step.mask(queries, keys, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)[..., :keys]
    return weights @ v


AttentionInterface.register(NAME, packed_attention)
