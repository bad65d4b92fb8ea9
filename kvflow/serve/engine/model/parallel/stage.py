"""Pipeline stages: every process calls the whole model with the same tokens and positions, but has
only the layers of its stage.

Placeholders, which return the hidden states that they receive, replace the other layers. So the
model's own code computes embeddings, masks, rotary tables and everything else that depends on the
tokens alone. The first layer of the stage takes the hidden states that were received, and the
placeholder after the stage's last layer ends the forward. Outside a step of `Neighbours`, a stage
neither receives nor sends hidden states: it is a small model, which the probe and the self-test can
run.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.parallel.link import HiddenSink, HiddenSource


class StageEnd(BaseException):
    """Raised to end a forward after the stage's last layer; carries the hidden states.

    It derives from BaseException because it is not an error, and error handlers must not catch it.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the layers of this stage end here")
        self.hidden = hidden


class _Passage(threading.local):
    """The source and the sink of hidden states for the forward that this thread runs."""

    source: HiddenSource | None = None
    sink: HiddenSink | None = None


passage = _Passage()


class _Convention:
    """A model's convention for the output of layers: hidden states, or a tuple beginning with them.

    `length` is the length of the tuple, learned from a layer of this stage. Until such a layer
    runs, placeholders return a tuple. A model that expects no tuple passes it unchanged to the next
    layer, while a model that expects a tuple would unpack a bare tensor without an error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.length: int | None = 2  # None: no tuple
        self._more: list[Any] = []  # other outputs of the layer that ran last

    def plain(self, hidden: Any) -> Any:
        if isinstance(hidden, tuple):
            self.length = None
            return hidden[0]
        return hidden

    def learn(self, output: Any) -> None:
        self.length = len(output) if isinstance(output, tuple) else None
        self._more = [more for more in output[1:] if more is not None] if self.length else []

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that the previous layer passes on only hidden states. Raises: MisuseError."""
        if self._more and any(
            value is more for value in (*args, *kwargs.values()) for more in self._more
        ):
            what = "its layers hand on more than hidden states"
            raise MisuseError(f"model {self._name!r} cannot be cut into stages: {what}")
        self._more = []


class ForeignLayer(nn.Module):
    """The placeholder for layer `index`, which belongs to another stage.

    `follows` is True for the placeholder right after this stage's last layer.
    """

    def __init__(
        self, layer: nn.Module, index: int, convention: _Convention, *, follows: bool
    ) -> None:
        super().__init__()
        self.index = index
        self._convention, self._follows = convention, follows
        # Copy plain attributes, because models read some of them before they call a layer.
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float, bool)) and not name.startswith("_"):
                setattr(self, name, value)
        # Keep the buffers, because the constructors of some models write to them.
        for name, buffer in layer.named_buffers():
            *path, last = name.split(".")
            inside: nn.Module = self
            for step in path:
                if step not in inside._modules:
                    inside.add_module(step, nn.Module())
                inside = inside.get_submodule(step)
            inside.register_buffer(last, buffer, persistent=False)

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = self._convention.plain(hidden_states)
        self._convention.check(args, kwargs)
        if self._follows and passage.sink is not None:
            raise StageEnd(hidden)
        length = self._convention.length
        return hidden if length is None else (hidden, *(None for _ in range(length - 1)))


def decoder_layers(model: Any, name: str) -> nn.ModuleList:
    """Return the model's outermost list of all layers. Raises: MisuseError if there is none."""
    count = model.config.get_text_config().num_hidden_layers
    for inside in (model.get_decoder(), model):
        found = [
            (path, m)
            for path, m in inside.named_modules()
            if isinstance(m, nn.ModuleList) and len(m) == count
        ]
        if found:
            layers: nn.ModuleList = min(found, key=lambda item: item[0].count("."))[1]
            return layers
    raise MisuseError(f"model {name!r} cannot be cut into stages: it has no list of {count} layers")


def keep_layers(model: Any, own: range, name: str) -> None:
    """Replace all layers of a model, except for `own`, with placeholders. Raises: MisuseError."""
    layers, convention = decoder_layers(model, name), _Convention(name)
    for i in range(len(layers)):
        if i not in own:
            layers[i] = ForeignLayer(layers[i], i, convention, follows=i == own.stop)

    def enter(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = convention.plain(args[0] if args else kwargs["hidden_states"])
        hidden = found if passage.source is None else passage.source.receive(found)
        return (
            ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        )

    def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        convention.learn(output)

    first = layers[own.start]
    if own.start:
        first.register_forward_pre_hook(enter, with_kwargs=True)
    first.register_forward_hook(leave)
    if len(own) > 1:
        layers[own.start + 1].register_forward_pre_hook(
            lambda _, args, kwargs: convention.check(args, kwargs), with_kwargs=True
        )


def is_stage(model: Any) -> bool:
    return any(isinstance(module, ForeignLayer) for module in model.modules())


def stage_class(config: Any, own: range, name: str) -> tuple[type, Any]:
    """Return a transformers class that has only the `own` layers, and its configuration.

    The weights of other layers are then not read.

    Raises: MisuseError if this version of transformers is not supported.
    """
    mapping = getattr(AutoModelForCausalLM, "_model_mapping", None)
    if mapping is None:
        raise MisuseError(
            f"model {name!r} cannot be cut into stages with transformers "
            f"{transformers.__version__}: it works with 5.23"
        )
    base = mapping[type(config)]
    if isinstance(base, (list, tuple)):
        base = base[0]
    # A multimodal configuration may map to a text-only class. Such a class takes only the text part
    # of the configuration.
    if getattr(base, "config_class", None) is type(config.get_text_config()):
        config = config.get_text_config()

    def init(self: Any, given: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, given, *args, **kwargs)
        keep_layers(self, own, name)

    return type(base.__name__, (base,), {"__init__": init, "__module__": base.__module__}), config


def stock_cache(model: Any) -> DynamicCache:
    """Return transformers' own cache for a model or a stage.

    Models ask layer 0, or the first layer of a kind, how long a sequence is. So in a stage, the
    cache entries for layers of other stages are replaced by entries for layers of this stage, of
    the same kind if possible.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    foreign = {module.index for module in model.modules() if isinstance(module, ForeignLayer)}
    own = [layer for i, layer in enumerate(cache.layers) if i not in foreign]
    for i in foreign:
        if i < len(cache.layers):
            cache.layers[i] = _stand_in(cache.layers[i], own)
    return cache


def _stand_in(layer: Any, own: list[Any]) -> Any:
    alike = [o for o in own if type(o) is type(layer)]
    if not alike and isinstance(layer, CacheLayerMixin):
        alike = [o for o in own if isinstance(o, CacheLayerMixin)]
    return alike[0] if alike else layer
