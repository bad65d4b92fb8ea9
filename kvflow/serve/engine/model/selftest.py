"""The self-test at start-up. It runs a model over pages, and chooses its attention mode."""

from __future__ import annotations

import inspect
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import DynamicCache

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.engine.model.attention import window_recorder
from kvflow.serve.engine.model.parallel.stage import stock_cache
from kvflow.serve.engine.model.probe import Layers, cache_argument, have_rows, kinds_of, with_rings
from kvflow.serve.engine.model.runner import Runner, set_packed
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.model.windows import RingChoice

Mode = Literal["packed", "pad"]
PAGE_SIZE = 4
LENGTHS = (23, 9)
CHUNK = 10
# For windows up to this size, a test prompt is longer than the window, so that rings wrap around.
MOST_WRAPPED = 256

# The allowed difference of logits, relative to their spread. With a wrong mask, the difference is
# about 1.
_TOLERANCE = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.15}
_MAX_TOLERANCE = {"float32": 1e-2, "float16": 0.5, "bfloat16": 0.7}


class Fit(NamedTuple):
    """A model's attention mode and streams, and whether it must compute prompts in one chunk."""

    mode: Mode
    whole_prompts: bool
    layers: Layers


class Reference(NamedTuple):
    """The prompts of the self-test, and the logits of the model with transformers' own cache.

    `logits` [prompts, vocabulary] follow the last token of each prompt, when the prompt is fed
    `chunk` tokens at a time and the last token alone. `noise` is the difference from the logits of
    the same prompts when fed in another way. `whole` is True if prompts must be computed in one
    chunk.
    """

    prompts: list[list[int]]
    logits: torch.Tensor
    chunk: int
    noise: float
    whole: bool = False


def choose_fit(model: Any, layers: Layers, name: str, requested: str, rings: RingChoice) -> Fit:
    """Choose the first mode whose logits agree with those of transformers' own cache.

    `requested` is a mode, or "auto", which tries packed and then pad. The model's attention remains
    set to the chosen mode.

    Raises: MisuseError if no mode agrees, or if transformers' own logits depend too much on how a
    prompt is divided.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    candidates = _candidates(layers, requested, rings)
    windows = [layer.ring for layer in candidates[0][1] if layer and layer.ring]
    reference = _reference(model, layers, min(windows, default=0))
    limit = _MAX_TOLERANCE.get(dtype, 0.5)
    if not reference.noise <= limit:
        raise MisuseError(
            f"model {name!r} is not supported: transformers' own logits differ between a chunked "
            f"and a whole prompt (relative error {reference.noise:.2g}, allowed {limit:.2g})"
        )
    allowed = min(max(_TOLERANCE.get(dtype, 0.15), 4 * reference.noise), limit)
    reasons: list[str] = []
    for mode, kept in candidates:
        reason = _try(model, kept, mode, reference, allowed)
        if reason is None:
            return Fit(mode, reference.whole, kept)
        reasons.append(f"{mode}{'' if kept is layers else ', windows in rows'}: {reason}")
    if rings == "need":
        raise MisuseError(
            f"--sliding-window-rows always: model {name!r} fails its self-test so ({reasons[0]})"
        )
    raise MisuseError(
        f"model {name!r} is not supported: the self-test failed ({'; '.join(reasons)})"
    )


def _candidates(layers: Layers, requested: str, rings: RingChoice) -> list[tuple[Mode, Layers]]:
    modes: list[Mode] = ["packed", "pad"]
    found = [(mode, layers) for mode in modes if requested in (mode, "auto")]
    if rings == "never":
        return found
    return [("packed", with_rings(layers)), *(found if rings == "try" else [])]


def _try(
    model: Any, layers: Layers, mode: Mode, reference: Reference, allowed: float
) -> str | None:
    """Return the reason why the mode does not work, or None when it works."""
    if mode == "packed" and (
        beside := [kind.name for layer in layers if layer for kind in layer.beside]
    ):
        return f"the model keeps more than K and V ({beside[0]})"
    if not set_packed(model, mode == "packed"):
        return "the model does not take an attention function"
    window_recorder.windows = {}
    try:
        paged = _paged(model, layers, reference, packed=mode == "packed")
        windows = window_recorder.windows
    # Models may break the interface in unforeseen ways, so any error rules this mode out.
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        window_recorder.windows = None
    if (error_size := distance(paged, reference.logits)) > allowed:
        return f"logits differ by {error_size:.2g}, allowed {allowed:.2g}"
    if mode == "packed":
        for i, layer in enumerate(layers):
            if layer and layer.window and windows.get(i) != layer.window:
                return (
                    f"layer {i} has a window of {layer.window}, its attention function got "
                    f"{windows.get(i)}"
                )
    return None


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest error of any row of `a`, relative to the spread of that row of `b`."""
    a, b = a.float(), b.float()
    spread = (b - b.mean(dim=-1, keepdim=True)).norm(dim=-1)
    found = ((a - b).norm(dim=-1) / spread.clamp_min(1e-6)).max()
    # A value that is not finite must never pass as close.
    return float(found) if bool(torch.isfinite(found)) else float("inf")


def _reference(model: Any, layers: Layers, window: int) -> Reference:
    """Compute the reference; `window` is the size of the smallest ring, 0 without rings."""
    vocabulary = model.get_input_embeddings().num_embeddings
    lengths, chunk = LENGTHS, CHUNK
    if max(LENGTHS) <= window <= MOST_WRAPPED:
        lengths, chunk = (window + CHUNK, min(LENGTHS)), window // 2
    prompts = [
        [(i * i * 7 + i * 13 + n * 5 + 3) % min(vocabulary, 997) for i in range(n)] for n in lengths
    ]

    def logits(chunk: int) -> torch.Tensor:
        return torch.cat([_stock(model, p, min(chunk, len(p))) for p in prompts])

    def stepped() -> torch.Tensor:
        return torch.cat([_stock(model, p, len(p) - 1) for p in prompts])

    whole = logits(max(lengths))
    # The names that transformers gives to the states that the model keeps.
    states = {
        name
        for layer in filter(None, layers)
        for name, kinds in (("conv_states", layer.conv), ("recurrent_states", layer.recurrent))
        if any(kinds)
    }
    if states and _ignores_states(model, prompts[0], states):
        alone = stepped()
        return Reference(prompts, alone, max(lengths), distance(alone, whole), whole=True)
    chunked = logits(chunk)
    noise = distance(chunked, whole)
    # nemotron_h computes a single token differently (without clamping dt). `chunked` feeds the last
    # token alone, so compare it with prompts fed in this way too.
    if states:
        noise = min(noise, distance(chunked, stepped()))
    return Reference(prompts, chunked, chunk, noise)


@torch.inference_mode()
def _ignores_states(model: Any, prompt: list[int], states: set[str]) -> bool:
    """Return True if a chunk ignores some of the `states` that the previous chunk left.

    The scans of mamba and jamba ignore these states, and begin at zero.
    """

    def second_chunk(spoiled: str = "") -> torch.Tensor:
        cache = stock_cache(model)
        _forward(model, cache, prompt, 0, CHUNK)
        for layer in cache.layers:
            for state in getattr(layer, spoiled, {}).values():
                if state is not None:
                    state.zero_()
        return _forward(model, cache, prompt, CHUNK, 2 * CHUNK)[0]

    honest = second_chunk()
    # The noise is 0 if the kernels are deterministic.
    noise = distance(second_chunk(), honest)
    return any(distance(second_chunk(name), honest) <= 4 * noise for name in states)


@torch.inference_mode()
def _stock(model: Any, prompt: list[int], chunk: int) -> torch.Tensor:
    """Return the logits [1, vocabulary] after `prompt`, computed with transformers' own cache.

    A prompt longer than `chunk` is fed that many tokens at a time, and its last token alone.
    """
    cache = stock_cache(model)
    logits = torch.empty(0)
    ends = [*range(chunk, len(prompt) - 1, chunk), len(prompt) - 1, len(prompt)]
    if chunk >= len(prompt):
        ends = [len(prompt)]
    start = 0
    for end in ends:
        logits = _forward(model, cache, prompt, start, end)[:, -1]
        start = end
    return logits


def _forward(
    model: Any, cache: DynamicCache, prompt: list[int], start: int, end: int
) -> torch.Tensor:
    """Return the logits [1, tokens, vocabulary] of the tokens `start`..`end` - 1."""
    more: dict[str, Any] = {"use_cache": True, cache_argument(model) or "": cache}
    if "position_ids" in inspect.signature(model.forward).parameters:
        # Without position ids, some models count positions from 0.
        more["position_ids"] = torch.arange(start, end, device=model.device)[None]
    logits: torch.Tensor = model(
        input_ids=torch.tensor([prompt[start:end]], device=model.device), **more
    ).logits
    return logits


def _paged(model: Any, layers: Layers, reference: Reference, *, packed: bool) -> torch.Tensor:
    """Compute the reference's prompts over pages, and return the logits after each of them.

    The last tokens of all prompts form one batch.
    """
    prompts = reference.prompts
    count = sum(-(-len(p) // PAGE_SIZE) for p in prompts)
    num_rows = len(prompts) if have_rows(layers) else 0
    layout = build_layout(kinds_of(layers), page_size=PAGE_SIZE, num_pages=count, num_rows=num_rows)
    pool = PagedPool.allocate(layout, device=model.device)
    try:
        runner = Runner(model, layers, pool, packed=packed)
        sequences = [Sequence(i, p, 0, PAGE_SIZE) for i, p in enumerate(prompts)]
        order = (
            torch.randperm(count, generator=torch.Generator().manual_seed(1))
            .to(torch.int32)
            .numpy()
        )
        for i, s in enumerate(sequences):
            s.add_pages(order[: s.pages_missing(s.length)])
            order = order[s.page_count :]
            s.rows = np.array([i] if num_rows else [], dtype=np.int32)
        while any(s.computed < s.length - 1 for s in sequences):
            rows = [
                Row(s, n, 0)
                for s in sequences
                if (n := min(reference.chunk, s.length - 1 - s.computed))
            ]
            runner.forward(rows)
            for r in rows:
                r.sequence.computed += r.new
        return runner.forward([Row(s, 1) for s in sequences])
    finally:
        pool.close()
