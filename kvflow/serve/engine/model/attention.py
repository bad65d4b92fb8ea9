"""The attention function `kvflow`: scaled dot product attention over one packed row of prompt
chunks or decoding sequences.

Chunks are computed one sequence at a time. Sequences that decode one token each are computed in
batches, with one call per batch.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AttentionInterface

from kvflow.serve.engine.model.batch import Batch, Span
from kvflow.serve.engine.model.rings import Rings
from kvflow.serve.engine.model.step import Step, current

NAME = "kvflow"


class _WindowRecorder(threading.local):
    """Records the sliding window (0: none) that each layer passes to attention in the self-test."""

    windows: dict[int, int] | None = None


window_recorder = _WindowRecorder()


def packed_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Call `attend`, as one call if the step is recorded."""
    if current.recorder is not None:
        found: tuple[torch.Tensor, None] = current.recorder.attend(attend, *args, **kwargs)
        return found
    return attend(*args, **kwargs)


def attend(
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
    """Compute attention for each span or batch of the current step.

    `query` is [1, heads, tokens, dim], `key` and `value` are [1, kv heads, keys, dim], `s_aux` has
    one sink per head. The result is [1, tokens, heads, dim]. `attention_mask` and `dropout` are
    part of transformers' interface, and unused.
    """
    step = current.step
    if step is None:
        raise RuntimeError(
            "the attention function kvflow was called outside a step of kvflow's runner"
        )
    window, layer = sliding_window or 0, getattr(module, "layer_idx", -1)
    if window_recorder.windows is not None:
        window_recorder.windows[layer] = window
    ring = current.rings.window_of(layer, window)
    keys: Step | Rings = step.rings(ring) if ring else step
    if keys.batches:
        found = [
            _batched(batch, query, key, value, scaling, window, softcap, s_aux)
            for batch in keys.batches
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1), None
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for span in keys.spans:
        q = query[:, :, span.q0 : span.q1]
        k, v = key[:, :, span.k0 : span.k1], value[:, :, span.k0 : span.k1]
        if softcap or s_aux is not None:
            attended = _plain(step, q, k, v, scaling, window, softcap, s_aux)
        else:
            attended = _many_queries(step, span, q, k, v, scaling, window)
        out[:, span.q0 : span.q1] = attended.transpose(1, 2)
    return out, None


def _batched(
    batch: Batch,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, last = batch.rows, min(batch.keys, window or batch.keys)
    k, v = _keys_of(batch, key, last), _keys_of(batch, value, last)
    q = query[:, :, batch.q0 : batch.q1]
    # Query heads that share a K/V head become queries of that head, so that no key is repeated.
    q = (q if rows == 1 else q[0].transpose(0, 1)).reshape(rows, k.shape[1], -1, query.shape[-1])
    mask = batch.mask(last, q.dtype)
    if softcap or sinks is not None:
        scores = _scores(q, k, scaling, softcap)
        attended = _weighted(scores if mask is None else scores + mask, sinks, v)
    else:
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    return attended.reshape(1, rows, -1, v.shape[-1])


def _keys_of(batch: Batch, states: torch.Tensor, last: int) -> torch.Tensor:
    """Return the last keys of each row of the batch, [rows, kv heads, last, dim].

    `states` are [1, kv heads, keys, dim], and `last` is the number of keys to return per row.
    """
    if batch.rows == 1:
        return states.narrow(2, batch.k0 + batch.keys - last, last)
    return batch.region(states[0]).transpose(0, 1).narrow(2, batch.keys - last, last)


def _many_queries(
    step: Step,
    span: Span,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int,
) -> torch.Tensor:
    queries, keys = span.q1 - span.q0, span.k1 - span.k0
    causal = queries == keys and not (window and keys > window)
    mask = None if causal else step.mask(queries, keys, window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _plain(
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    window: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with soft-capped scores or attention sinks, which torch's kernels lack."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    queries, keys = q.shape[2], k.shape[2]
    scores = _scores(q, k, scaling, softcap)
    if queries > 1 or window:
        scores = scores.masked_fill(~step.mask(queries, keys, window), float("-inf"))
    return _weighted(scores, sinks, v)


def _scores(
    q: torch.Tensor, k: torch.Tensor, scaling: float | None, softcap: float | None
) -> torch.Tensor:
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _weighted(scores: torch.Tensor, sinks: torch.Tensor | None, v: torch.Tensor) -> torch.Tensor:
    """Return the sums of `v`, weighted by the softmax of `scores` [batch, kv heads, queries, keys].

    A head's sink takes a share of the weights, but adds no value.
    """
    keys = scores.shape[-1]
    if sinks is not None:
        # Each query head has one sink. In `_batched`, heads that share a K/V head are its queries.
        share = sinks.view(1, scores.shape[1], -1, 1)
        scores = torch.cat([scores, share.expand(scores.shape[0], -1, scores.shape[2], 1)], dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)[..., :keys] @ v


AttentionInterface.register(NAME, packed_attention)
