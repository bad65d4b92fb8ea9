"""A model's identity: the same at any path, another for another configuration or weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvflow import model_files
from kvflow.model_files import STRETCH_BYTES, STRETCHES, config_digest
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.layout import MAX_LABEL, build_layout
from kvflow.serve.engine.model.load import load_model
from tests.serve.engine.tiny_models import Tiny


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("llama"), tmp_path / "elsewhere"))


def edit(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**dict(reversed(config.items())), **changes}))


def test_it_is_the_same_wherever_it_lies(tiny: Tiny, copied: Path) -> None:
    edit(copied, transformers_version="4.0.0", _name_or_path="other", dtype="float32")
    there = load_model(str(copied)).fingerprint
    assert there == load_model(str(tiny("llama"))).fingerprint
    assert there.startswith("LlamaForCausalLM 4x64 float32 config ") and len(there) <= MAX_LABEL


def test_another_configuration_is_another_model(tiny: Tiny, copied: Path) -> None:
    edit(copied, rms_norm_eps=1e-4)
    assert load_model(str(copied)).fingerprint != load_model(str(tiny("llama"))).fingerprint


def test_another_fine_tune_is_refused_with_both_names(tiny: Tiny, copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] += 1e-3
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    here, there = load_model(str(tiny("llama"))), load_model(str(copied))
    layouts = [
        build_layout(model.streams, page_size=4, num_pages=4, fingerprint=model.fingerprint)
        for model in (here, there)
    ]
    assert differences(layouts[0], layouts[1]) == [
        f"model fingerprint: prefill {here.fingerprint!r}, decode {there.fingerprint!r}"
    ]
    assert here.fingerprint.split(" weights ")[0] == there.fingerprint.split(" weights ")[0]


def test_a_digest_is_that_of_earlier_versions() -> None:
    """Peers whose digests differ are refused, also while one after the other is upgraded."""
    assert config_digest({}) == "44136fa3"
    assert (
        config_digest({"a": 1, "b": {"c": None}})
        == config_digest({"b": {"c": None}, "a": 1})
        == "66282992"
    )


def test_of_a_large_weight_a_sample_is_read_from_end_to_end() -> None:
    whole = STRETCHES * STRETCH_BYTES
    assert model_files._places(whole) == [(0, whole)], "all of it"
    places = model_files._places(whole + 1)
    assert len(places) == STRETCHES and {count for _, count in places} == {STRETCH_BYTES}
    assert places[0][0] == 0 and places[-1][0] == whole + 1 - STRETCH_BYTES
    assert places == sorted(places)
