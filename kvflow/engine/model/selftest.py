"""The start-up check of a model over pages against transformers' own cache, and the choice of its attention mode."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from transformers import DynamicCache

from kvflow.engine.model.attention import WindowRecorder
from kvflow.engine.model.probe import LayerStreams
from kvflow.engine.model.runner import Runner, set_packed
from kvflow.engine.model.sequence import Sequence
from kvflow.engine.model.step import Row
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import build_layout

Mode = Literal["packed", "pad"]
PAGE_SIZE = 4
LENGTHS = (23, 9)
CHUNK = 10

# The allowed difference of logits, relative to their spread. A wrong mask or page makes it about 1.
_TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.15}
_MAX_TOLERANCE = {"float32": 1e-2, "float16": 0.5, "bfloat16": 0.7}


class Reference(NamedTuple):
    """Prompts, stock logits after each of them, and the stock model's own difference when it is fed in chunks."""

    prompts: list[list[int]]
    logits: torch.Tensor
    noise: float


def choose_mode(model: Any, layers: tuple[LayerStreams | None, ...], name: str, requested: str) -> Mode:
    """The first mode that agrees with transformers' own cache; `requested` is one mode, or "auto" for packed, then pad.

    The model's attention stays set to it. Raises: MisuseError when no mode agrees.
    """
    dtype = next(layer.dtype for layer in layers if layer)
    reference = _reference(model)
    limit = _MAX_TOLERANCE.get(dtype, 0.5)
    if not reference.noise <= limit:
        raise MisuseError(
            f"model {name!r} is not supported: transformers' own logits differ between a chunked and a whole prompt "
            f"(relative error {reference.noise:.2g}, allowed {limit:.2g})"
        )
    allowed = min(max(_TOLERANCE.get(dtype, 0.15), 4 * reference.noise), limit)
    modes: tuple[Mode, ...] = (
        ("packed", "pad") if requested == "auto" else ("packed",) if requested == "packed" else ("pad",)
    )
    reasons: list[str] = []
    for mode in modes:
        reason = _try(model, layers, mode, reference, allowed)
        if reason is None:
            return mode
        reasons.append(f"{mode}: {reason}")
    raise MisuseError(f"model {name!r} is not supported: the self-test failed ({'; '.join(reasons)})")


def _try(
    model: Any, layers: tuple[LayerStreams | None, ...], mode: Mode, reference: Reference, allowed: float
) -> str | None:
    """None when the mode works, else the reason why it does not."""
    if not set_packed(model, mode == "packed"):
        return "the model does not take an attention function"
    WindowRecorder.windows = {}
    try:
        paged = _paged(model, layers, reference.prompts, packed=mode == "packed")
        windows = WindowRecorder.windows
    # A model may break the interface in unforeseen ways; any error means that it does not support this mode.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        WindowRecorder.windows = None
    if (error_size := distance(paged, reference.logits)) > allowed:
        return f"logits differ by {error_size:.2g}, allowed {allowed:.2g}"
    if mode == "packed":
        for i, layer in enumerate(layers):
            if layer and layer.window and windows.get(i) != layer.window:
                return f"layer {i} has a window of {layer.window}, its attention function got {windows.get(i)}"
    return None


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest error of a row, relative to the spread of that row of `b`; inf when a value is not finite."""
    a, b = a.float(), b.float()
    spread = (b - b.mean(dim=-1, keepdim=True)).norm(dim=-1)
    found = ((a - b).norm(dim=-1) / spread.clamp_min(1e-6)).max()
    return float(found) if bool(torch.isfinite(found)) else float("inf")


def _reference(model: Any) -> Reference:
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = [[(i * i * 7 + i * 13 + n * 5 + 3) % min(vocabulary, 997) for i in range(n)] for n in LENGTHS]
    whole = torch.cat([_stock(model, p, len(p)) for p in prompts])
    chunked = torch.cat([_stock(model, p, CHUNK) for p in prompts])
    return Reference(prompts, whole, distance(chunked, whole))


@torch.inference_mode()
def _stock(model: Any, prompt: list[int], chunk: int) -> torch.Tensor:
    """Stock logits [1, vocabulary] after `prompt`, fed `chunk` tokens at a time (the last one alone, when chunked)."""
    cache = DynamicCache(config=model.config.get_text_config())
    logits = torch.empty(0)
    ends = [*range(chunk, len(prompt) - 1, chunk), len(prompt) - 1, len(prompt)]
    if chunk >= len(prompt):
        ends = [len(prompt)]
    start = 0
    for end in ends:
        ids = torch.tensor([prompt[start:end]], device=model.device)
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        start = end
    return logits


def _paged(
    model: Any, layers: tuple[LayerStreams | None, ...], prompts: list[list[int]], *, packed: bool
) -> torch.Tensor:
    """The same logits from pages: two prompts at once, in chunks, their last tokens decoded in one batch."""
    count = sum(-(-len(p) // PAGE_SIZE) for p in prompts)
    streams = [s for layer in layers if layer for s in layer.streams]
    pool = PagedPool.allocate(build_layout(streams, page_size=PAGE_SIZE, num_pages=count), device=model.device)
    try:
        runner = Runner(model, layers, pool, packed=packed)
        sequences = [Sequence(i, p, 0, PAGE_SIZE) for i, p in enumerate(prompts)]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.int32).numpy()
        for s in sequences:
            s.add_pages(order[: s.pages_missing(s.length)])
            order = order[s.page_count :]
        while any(s.computed < s.length - 1 for s in sequences):
            rows = [Row(s, n, 0) for s in sequences if (n := min(CHUNK, s.length - 1 - s.computed))]
            runner.forward(rows)
            for r in rows:
                r.sequence.computed += r.new
        return runner.forward([Row(s, 1) for s in sequences])
    finally:
        pool.close()
