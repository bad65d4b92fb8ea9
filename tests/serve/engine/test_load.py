"""Loading: what is refused with one clear line, and which mode the self-test chooses."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from transformers.utils import logging as transformers_logging

from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.serve.engine.model import load, quiet, selftest
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.probe import _TOKENS, _read_layer, probe
from kvflow.serve.engine.model.quiet import explained
from kvflow.serve.engine.model.tokenizer import load_tokenizer
from tests.serve.engine import tiny_models
from tests.serve.engine.tiny_models import Loaded, Stock, Tiny


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("minimax", {}, "cannot be probed: MiniMax uses cache of its own"),
        ("llama4_chunked", {"attention": "packed"}, "packed: "),
        (
            "lfm2",
            {"attention": "packed"},
            r"packed: the model keeps more than K and V \(layer0\.conv0\)",
        ),
        ("/nowhere/at/all", {}, "model path '/nowhere/at/all' does not exist"),
        ("", {}, "does not exist"),
        ("x", {"dtype": "int3"}, "dtype 'int3' is not one of"),
        ("x", {"attention": "flash"}, "attention 'flash' is not one of"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_one_line(
    family: str, options: dict[str, Any], said: str, tiny: Tiny
) -> None:
    path = str(tiny(family)) if family in tiny_models.ALL else family
    with pytest.raises(MisuseError, match=said) as caught:
        load_model(path, **options)
    assert "\n" not in str(caught.value)


def test_threads_that_load_at_once_leave_transformers_as_it_was(tiny: Tiny) -> None:
    path, together = str(tiny("gpt2")), threading.Barrier(4)

    def load() -> LoadedModel:
        together.wait(60)
        return load_model(path)

    def of_the_process() -> tuple[object, ...]:
        swapped = PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.nn.init.normal_
        return *swapped, transformers_logging.get_verbosity(), list(warnings.filters)

    before = of_the_process()
    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            models = [one.result(60) for one in [threads.submit(load) for _ in range(4)]]
        assert of_the_process() == before
        assert len({model.fingerprint for model in models}) == 1


def test_a_stream_that_is_not_known_is_refused_by_name(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(tiny("deepseek_v32")).eval()
    update = DynamicIndexedLayer.update_indexer
    for name, value in (
        ("indexer_scales", lambda k: k[..., :1]),
        ("summaries", lambda k: {0: None, 1: [(k,)]}),
    ):

        def keeping(
            layer: Any, keys: torch.Tensor, name: str = name, value: Any = value
        ) -> torch.Tensor:
            setattr(layer, name, value(keys))
            found: torch.Tensor = update(layer, keys)
            return found

        monkeypatch.setattr(DynamicIndexedLayer, "update_indexer", keeping)
        with pytest.raises(
            MisuseError, match=rf"layer 0 keeps {name}.*, which is not known as state of a request"
        ):
            probe(stock, "deepseek_v32")


def test_what_is_kept_is_described_as_it_is(loaded: Loaded) -> None:
    half = loaded("falcon_h1", "bfloat16")
    assert half.streams[:4] == [
        StateKind("layer0.k", "bfloat16", (2, 16)),
        StateKind("layer0.v", "bfloat16", (2, 16)),
        StateKind("layer0.conv0", "bfloat16", (96, 4), ROW),
        StateKind("layer0.recurrent0", "float32", (4, 16, 16), ROW),
    ]
    assert loaded("deepseek_v32").streams[2] == StateKind("layer0.index_k", "float32", (16,))
    assert {kind.unit for kind in loaded("mamba2").streams} == {ROW}
    names = [kind.name for kind in loaded("lfm2").streams[:3]]
    assert names == ["layer0.conv0", "layer1.k", "layer1.v"]
    mla = loaded("deepseek_v3").layers[0]
    assert mla is not None and [kind.shape for kind in mla.kinds] == [(1, 24), (1, 8)]
    shared = loaded("gemma4_shared_kv")
    assert [layer is None for layer in shared.layers[:2]] == [False, False]
    assert len(shared.streams) == 4
    assert loaded("mistral").layers[0].window == 16  # type: ignore[union-attr]
    half = loaded("llama", "bfloat16")
    assert half.dtype == "bfloat16" and {kind.dtype for kind in half.streams} == {"bfloat16"}


@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", "packed"), ("llama4_chunked", "pad"), ("bloom", "pad"), ("qwen3_next", "pad")],
)
def test_the_self_test_chooses_the_mode(family: str, mode: str, loaded: Loaded) -> None:
    """llama4's chunked masks never reach an attention function; bloom takes no positions."""
    assert loaded(family).mode == mode


def test_the_recommended_sampling_is_read(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama")
    assert load_model(str(source)).sampling_defaults == {}
    path = shutil.copytree(source, tmp_path / "model")
    recommended = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    recommended["repetition_penalty"] = 1.1
    (path / "generation_config.json").write_text(
        json.dumps({**recommended, "do_sample": True, "eos_token_id": 2})
    )
    assert load_model(str(path)).sampling_defaults == recommended


def test_a_model_wrong_on_our_pages_fails_its_self_test(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = selftest._paged
    monkeypatch.setattr(selftest, "_paged", lambda *a, **k: honest(*a, **k).roll(1, -1))
    with pytest.raises(
        MisuseError, match=r"self-test failed \(packed: logits differ by .*; pad: logits differ"
    ):
        load_model(str(tiny("llama")))


@pytest.mark.parametrize(
    ("chunk", "fed"),
    [
        (9, [(0, 9)]),
        (20, [(0, 9)]),
        (8, [(0, 8), (8, 9)]),
        (7, [(0, 7), (7, 8), (8, 9)]),
        (4, [(0, 4), (4, 8), (8, 9)]),
        (3, [(0, 3), (3, 6), (6, 8), (8, 9)]),
    ],
)
def test_the_reference_is_a_whole_prompt_or_chunks_and_the_last_token_alone(
    chunk: int, fed: list[tuple[int, int]], stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    model, forward = stock("llama"), selftest._forward

    def counted(model: Any, cache: Any, prompt: list[int], start: int, end: int) -> torch.Tensor:
        found.append((start, end))
        return forward(model, cache, prompt, start, end)

    monkeypatch.setattr(selftest, "_forward", counted)
    logits = selftest._stock(model, list(range(1, 10)), chunk)
    assert found == fed
    assert torch.allclose(
        logits, model(input_ids=torch.arange(1, 10)[None]).logits[:, -1], atol=1e-4
    )


class TakesPositions:
    """A model as far as the self-test calls it."""

    device = "cpu"

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any, position_ids: Any = None, **_: Any
    ) -> Any:
        return SimpleNamespace(
            logits=(input_ids.tolist(), None if position_ids is None else position_ids.tolist())
        )

    def __call__(self, **given: Any) -> Any:
        return self.forward(**given)


class TakesNone(TakesPositions):
    def forward(self, input_ids: torch.Tensor, past_key_values: Any, *_: Any, **more: Any) -> Any:
        assert set(more) == {"use_cache"}
        return SimpleNamespace(logits=(input_ids.tolist(), None))


@pytest.mark.parametrize(
    ("model", "positions"), [(TakesPositions(), [[3, 4]]), (TakesNone(), None)]
)
def test_the_reference_says_where_a_token_stands_to_whoever_asks(
    model: Any, positions: list[list[int]] | None
) -> None:
    """Without positions, some models count from 0 at each call."""
    cache: Any = None
    found: Any = selftest._forward(model, cache, [10, 11, 12, 13, 14, 15], 3, 5)
    assert found == ([[13, 14]], positions)


def test_a_model_that_disagrees_with_itself_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = selftest._stock
    monkeypatch.setattr(
        selftest,
        "_stock",
        lambda model, prompt, chunk: (
            honest(model, prompt, chunk) + (chunk < len(prompt)) * torch.rand(512)
        ),
    )
    with pytest.raises(
        MisuseError,
        match=(
            r"logits differ between a chunked and a whole prompt \(relative error \S+, allowed "
            r"0\.01\)"
        ),
    ):
        load_model(str(tiny("llama")))


def test_a_configuration_need_not_name_the_architecture(tiny: Tiny, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))
    model = load_model(str(path))
    assert model.architectures == ("LlamaForCausalLM",) and model.fingerprint.startswith(
        "LlamaForCausalLM 4x64 "
    )
    assert model.context_length == config["max_position_embeddings"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(), "OSError"),
        (KeyError("rope"), "KeyError 'rope'"),
        (ValueError("why:\n\n this\nand more"), "why: this"),
    ],
)
def test_what_transformers_raises_becomes_one_line(error: Exception, text: str) -> None:
    with pytest.raises(MisuseError) as told, explained("model 'm'"):
        raise error
    assert str(told.value) == f"model 'm': {text}"


def test_loading_is_silent_and_tells_how_far_it_is(
    tiny: Tiny, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny("llama"))
    capfd.readouterr()

    def of_transformers() -> tuple[object, ...]:
        logs = transformers_logging
        return logs.get_verbosity(), logs.is_progress_bar_enabled()

    before = of_transformers()
    told: list[tuple[str, float]] = []
    load_model(path, progress=lambda stage, done: told.append((stage, done)))
    assert capfd.readouterr() == ("", "")
    assert of_transformers() == before
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == ["configuration", "weights", "self-test", "ready"]
    assert (told[0], told[-2:]) == (("configuration", 1.0), [("self-test", 0.0), ("ready", 1.0)])
    weights = [done for stage, done in told if stage == "weights"]
    assert weights == sorted(weights) and weights[-1] == 1.0 and len(weights) > 10


def test_a_name_on_a_hub_is_no_folder_without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = "kvflow.serve.engine.model.tokenizer.AutoTokenizer.from_pretrained"
    monkeypatch.setattr(loads, lambda source: ("tokenizer of", source))
    assert load_tokenizer("somebody/model", "somebody/model") == ("tokenizer of", "somebody/model")


def test_only_the_bar_of_the_weights_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, float]] = []

    def bar(*args: Any, **kwargs: Any) -> str:
        return "the bar"

    weights = {"desc": "Loading weights"}
    monkeypatch.setattr(quiet._reporting, "report", None, raising=False)
    assert quiet._with_report(bar, ([1, 2],), weights) == "the bar"
    monkeypatch.setattr(
        quiet._reporting,
        "report",
        lambda what, share: reported.append((what, share)),
        raising=False,
    )
    assert quiet._with_report(bar, ([1, 2],), {"desc": "Downloading"}) == "the bar"
    assert quiet._with_report(bar, (iter([1, 2]),), weights) == "the bar", "no length"
    assert list(quiet._with_report(bar, ([1, 2],), weights)) == [1, 2]
    assert reported == [("weights", 0.0), ("weights", 0.5), ("weights", 1.0)]


@pytest.mark.parametrize(
    ("shape", "dtype", "shown"),
    [
        ((2, 4, _TOKENS, 8), torch.float32, "of float32 for"),
        ((1, 4, _TOKENS + 1, 8), torch.float32, "of float32 for"),
        ((1, 4, 4, _TOKENS, 8), torch.float32, "of float32 for"),
        ((1, _TOKENS), torch.float32, "of float32 for"),
        ((1,), torch.float32, "of float32 for"),
        ((1, 4, _TOKENS, 8), torch.complex64, "of complex64 for"),
    ],
)
def test_keys_of_another_form_are_refused(
    shape: tuple[int, ...], dtype: torch.dtype, shown: str
) -> None:
    layer = SimpleNamespace(keys=torch.zeros(shape, dtype=dtype))
    config = SimpleNamespace(model_type="new")
    with pytest.raises(MisuseError, match=rf"layer 3 keeps keys \[.*\] {shown} {_TOKENS} tokens"):
        _read_layer(layer, 3, "a-model", config)


@pytest.mark.parametrize("shape", [(2, 5), (1,)])
def test_states_that_are_not_one_requests_are_refused(shape: tuple[int, ...]) -> None:
    layer = SimpleNamespace(number_of_states=1, conv_states=[torch.zeros(shape)])
    with pytest.raises(
        MisuseError, match=r"keeps conv_states\[0\] \[.*\] of float32 for one request"
    ):
        _read_layer(layer, 3, "a-model", SimpleNamespace())


def test_the_forms_of_what_a_layer_keeps() -> None:
    layer = SimpleNamespace(
        number_of_states=1,
        keys=torch.zeros(1, 4, _TOKENS, 8),
        values=torch.zeros(1, _TOKENS, 6),
        conv_states=[torch.zeros(1, 5)],
        recurrent_states=[torch.zeros(1, 2, 3)],
    )
    found = _read_layer(layer, 3, "a-model", SimpleNamespace())
    assert found is not None and found.keys is not None and found.values is not None
    assert (found.keys.shape, found.values.shape) == ((4, 8), (6,))
    states = [kind for kind in (*found.conv, *found.recurrent) if kind is not None]
    assert [kind.shape for kind in states] == [(5,), (2, 3)]
    assert [kind.unit for kind in (found.keys, *states)] == ["slot", "row", "row"]


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_position_embeddings": 512, "seq_length": 8}, 512),
        ({"max_position_embeddings": None, "n_positions": 64}, 64),
        # Some have the field and leave it at 0, where another one tells the length.
        ({"max_position_embeddings": 0, "n_positions": 128}, 128),
        ({"max_position_embeddings": 0, "max_seq_len": 32}, 32),
        ({"max_position_embeddings": -1}, load.NO_LIMIT),
        ({}, load.NO_LIMIT),
    ],
)
def test_how_many_tokens_a_model_takes(fields: dict[str, Any], length: int) -> None:
    assert load._context_length(SimpleNamespace(**fields)) == length
