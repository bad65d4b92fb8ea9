"""Loading a model from a directory or a Hugging Face name, and refusing one that cannot run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import StateKind, unit_bytes
from kvflow.serve.engine.model.device import find_device
from kvflow.serve.engine.model.grammars import Grammars
from kvflow.serve.engine.model.identity import fingerprint
from kvflow.serve.engine.model.parallel.division import of_every_shard
from kvflow.serve.engine.model.parallel.joining import joined
from kvflow.serve.engine.model.parallel.neighbours import ALONE, Neighbours
from kvflow.serve.engine.model.parallel.part import WHOLE, Meeting, ModelPart, own_layers
from kvflow.serve.engine.model.parallel.stage import stage_class
from kvflow.serve.engine.model.parallel.tensor import check_plan
from kvflow.serve.engine.model.probe import Layers, have_rows, kinds_of, probe, refuse_by_config
from kvflow.serve.engine.model.quiet import Progress, explained, quiet
from kvflow.serve.engine.model.runner import Runner, hidden_size_of
from kvflow.serve.engine.model.selftest import Mode
from kvflow.serve.engine.model.source import locate
from kvflow.serve.engine.model.tokenizer import load_tokenizer
from kvflow.serve.engine.model.windows import SLIDING_WINDOW_ROWS, choose_rings

DTYPES = ("auto", "float32", "float16", "bfloat16")
ATTENTIONS = ("auto", "packed", "pad")
NO_LIMIT = 1 << 20
_LOADING = threading.Lock()
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class LoadedModel:
    """A model, or one part of a model, that passed the self-test.

    `streams` and `fingerprint` are arguments of `build_layout`. A part has its own share of the
    streams, and the fingerprint of the whole model.

    `tokenizer` is None if the model has none. If `whole_prompts` is True, each prompt must be
    computed in one chunk, because the model ignores the states that earlier chunks left.
    """

    model: Any
    name: str
    model_type: str
    architectures: tuple[str, ...]
    dtype: str
    mode: Mode
    whole_prompts: bool
    layers: Layers
    eos_ids: frozenset[int]
    context_length: int
    vocab_size: int
    tokenizer: Any
    fingerprint: str
    sampling_defaults: Mapping[str, float]
    """The values that generation_config.json recommends, by field of `SamplingParams`."""
    part: ModelPart = WHOLE
    neighbours: Neighbours = ALONE
    """The processes of the other parts. Call `neighbours.close` when no more steps run."""
    other_states: bool = False
    """True if some part of a divided model keeps conv or recurrent states."""

    @property
    def hidden_size(self) -> int:
        """The width of the last hidden states; 0 if they are not available."""
        return hidden_size_of(self.model)

    @property
    def device(self) -> torch.device:
        found: torch.device = self.model.device
        return found

    @functools.cached_property
    def grammars(self) -> Grammars:
        """The grammars of requests to this model. Close them after the last request."""
        return Grammars(self.tokenizer, self.vocab_size, self.eos_ids)

    @property
    def streams(self) -> list[StateKind]:
        return kinds_of(self.layers)

    @property
    def streams_of_stage(self) -> list[StateKind]:
        """The streams of all shards of this stage, for a pool that they share."""
        return (
            of_every_shard(self.streams, self.part.shards) if self.part.shards > 1 else self.streams
        )

    @property
    def has_rows(self) -> bool:
        """True if each request keeps a row, for states or for rings."""
        return have_rows(self.layers)

    @property
    def has_states(self) -> bool:
        """True if some part of the model keeps conv or recurrent states for each request.

        These states depend on how the request's tokens are divided into steps.
        """
        return self.other_states or any(layer.has_states for layer in self.layers if layer)

    @property
    def ring_bytes(self) -> int:
        """The number of bytes in a request's row that hold the K and V of sliding windows."""
        kinds = [kind for layer in self.layers if layer and layer.ring for kind in layer.kinds]
        return sum(unit_bytes(kind.dtype, [int(n) for n in kind.shape]) for kind in kinds)

    @property
    def fewest_tokens(self) -> int:
        """The smallest number of a prompt's tokens that may be computed at once; see `chunk`."""
        return 2 if self.has_states else 1

    def chunk(self, remaining: int, most: int) -> int:
        """Return how many of a prompt's `remaining` tokens to compute at once, about `most`.

        A prompt that cannot be divided is computed as a whole. A model with states may treat a
        single token like a generated one, with different results (nemotron_h does). So for such a
        model, a chunk has at least two tokens, except in a prompt of one token. It leaves either
        none or at least two.
        """
        if self.whole_prompts:
            return remaining
        count = min(remaining, most)
        if self.has_states:
            count = min(remaining, max(2, count))
            if remaining - count == 1:
                count += 1 if count == 2 else -1
        return count

    def runner(self, pool: PagedPool) -> Runner:
        """Return a runner over `pool`. Raises: LayoutError if the pool does not fit."""
        return Runner(
            self.model, self.layers, pool, packed=self.mode == "packed", neighbours=self.neighbours
        )


def load_model(
    path: str,
    dtype: str = "auto",
    attention: str = "auto",
    progress: Progress | None = None,
    device: str = "cpu",
    sliding_window_rows: str = "auto",
    part: ModelPart = WHOLE,
    meeting: Meeting | None = None,
) -> LoadedModel:
    """Load, probe and self-test a model. Blocks until the model is ready.

    For `attention`, "auto" is packed mode if that works, otherwise pad mode. For `device`, see
    `find_device`; for `sliding_window_rows`, see the module `windows`.

    A model may be divided over `part.ranks` processes on this machine, each of which loads one
    `part`. The processes find each other through `meeting`, and each call returns when all of them
    are ready. One process cannot run two shards.

    Raises: MisuseError, with a one-line text, for an unknown path, dtype or device, an unsupported
    model, missing weights, a failed self-test, or a model that cannot be divided into such parts;
    LostError if another process with a part of the model ends or never arrives.
    """
    _check_choices(dtype, attention, sliding_window_rows)
    name, where = str(path), find_device(device)
    report = progress or (lambda stage, done: None)
    with quiet(report), joined(part, meeting) as others:
        # Locate the model first, so that a wrong name raises before any progress is reported.
        source = locate(name)
        config = _checked_config(source, name, part, where, report)
        model = _weights(source, name, dtype, where, *_class_for(config, part, name))
        tokenizer = load_tokenizer(source, name)
        report("self-test", 0.0)
        layers = _probed(model, name)
        loaded_dtype = str(model.dtype).removeprefix("torch.")
        identity = fingerprint(source, model, loaded_dtype)
        context_length = _context_length(model.config.get_text_config())
        rings = choose_rings(layers, sliding_window_rows, attention, context_length)
        layers = others.divide(model, layers, name)
        fit = others.choose_fit(model, layers, name, attention, rings, identity)
        neighbours = others.neighbours()
        report("ready", 1.0)
    return LoadedModel(
        model=model,
        name=name,
        model_type=str(config.model_type),
        architectures=tuple(config.architectures or (type(model).__name__,)),
        dtype=loaded_dtype,
        mode=fit.mode,
        whole_prompts=fit.whole_prompts,
        layers=fit.layers,
        eos_ids=_eos_ids(model),
        context_length=context_length,
        vocab_size=int(model.get_input_embeddings().num_embeddings),
        tokenizer=tokenizer,
        fingerprint=identity,
        sampling_defaults=_sampling_defaults(model),
        part=part,
        neighbours=neighbours,
        other_states=others.has_states,
    )


def _checked_config(
    source: str, name: str, part: ModelPart, device: torch.device, report: Progress
) -> Any:
    config = _config(source, name)
    report("configuration", 1.0)
    refuse_by_config(config, name)
    check_plan(config, part, name, device)
    return config


def _probed(model: Any, name: str) -> Layers:
    with explained(f"model {name!r} cannot be probed"):
        return probe(model, name)


def _check_choices(dtype: str, attention: str, sliding_window_rows: str) -> None:
    for what, given, known in (
        ("dtype", dtype, DTYPES),
        ("attention", attention, ATTENTIONS),
        ("sliding_window_rows", sliding_window_rows, SLIDING_WINDOW_ROWS),
    ):
        if given not in known:
            raise MisuseError(f"{what} {given!r} is not one of {', '.join(known)}")


def _class_for(config: Any, part: ModelPart, name: str) -> tuple[Any, dict[str, Any]]:
    own = own_layers(config, part, name)
    if part.stages == 1:
        return AutoModelForCausalLM, {}
    model_class, config = stage_class(config, own, name)
    return model_class, {"config": config}


def _config(source: str, name: str) -> Any:
    with explained(f"model {name!r} cannot be loaded"):
        return AutoConfig.from_pretrained(source)


def _weights(
    source: str, name: str, dtype: str, device: torch.device, model_class: Any, more: dict[str, Any]
) -> Any:
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    # transformers replaces functions while it loads; two loads at once could lose the originals.
    with _LOADING, explained(f"model {name!r} cannot be loaded"):
        # Mismatches are raised below, because transformers would only print them.
        loaded: Any = model_class.from_pretrained(
            source, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True, **more
        )
    model, info = loaded
    if mismatched := sorted(info["mismatched_keys"]):
        weight, found, expected = mismatched[0]
        raise MisuseError(
            f"model {name!r}: {len(mismatched)} weights do not have the shape that config.json "
            f"asks for: {weight!r} is {list(found)}, not {list(expected)}"
        )
    if missing := sorted(info["missing_keys"]):
        raise MisuseError(
            f"model {name!r}: the checkpoint lacks {len(missing)} weights, {missing[0]!r} among "
            "them"
        )
    with explained(f"model {name!r} does not fit on {device}"):
        return model.eval().to(device)


def _eos_ids(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _sampling_defaults(model: Any) -> dict[str, float]:
    config = getattr(model, "generation_config", None)
    given = {} if config is None else config.to_diff_dict()
    return {field: given[field] for field in RECOMMENDED if given.get(field) is not None}


def _context_length(text: Any) -> int:
    for field in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        length = getattr(text, field, None)
        if isinstance(length, int) and length > 0:
            return length
    return NO_LIMIT
