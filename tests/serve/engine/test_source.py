"""Where models come from: what cannot be loaded is named in one line, at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvflow.model_files import folder_of
from kvflow.protocols.errors import MisuseError
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.model.load import load_model
from kvflow.serve.engine.model.source import check_files, locate

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The hub's own client takes longer than this until it gives up; imports of a busy machine do not.
REQUEST_S = 30.0


def configured(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return change


def written(file: str, content: bytes) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / file).write_bytes(content)

    return change


def truncated(model: Path) -> None:
    os.truncate(model / WEIGHTS, 100_000)


def without_a_shard(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    first = dict(list(tensors.items())[:5])
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    save_file(first, model / shards[0], metadata={"format": "pt"})
    (model / WEIGHTS).unlink()
    weight_map = {name: shards[0 if name in first else 1] for name in tensors}
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def lacking_a_weight(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors.pop("model.norm.weight")
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def pickled(model: Path) -> None:
    (model / WEIGHTS).rename(model / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "model.safetensors cannot be read: .*not fully covered"),
        (written(WEIGHTS, b""), "model.safetensors cannot be read: .*header too small"),
        (written(WEIGHTS, bytes(range(256)) * 40), "model.safetensors cannot be read: .*header"),
        (
            written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "fetch .* git lfs pull",
        ),
        (lambda model: (model / WEIGHTS).unlink(), "no file named model.safetensors"),
        (
            without_a_shard,
            "1 of 2 files of weights are missing, model-00002-of-00002.safetensors is one",
        ),
        (lacking_a_weight, "the checkpoint lacks 1 weights, 'model.norm.weight' among them"),
        (pickled, "cannot be loaded: Weights only load failed"),
        (written(INDEX, b"{"), "model.safetensors.index.json cannot be read"),
        (
            configured(vocab_size=300),
            r"1 weights do not have the shape .*: .* is \[4096, 192\], not \[300, 192\]",
        ),
        (configured(model_type="quux"), "model type `quux`"),
        (configured(num_hidden_layers="many"), "field 'num_hidden_layers'"),
        (configured(num_hidden_layers=-1), "cannot be probed"),
        (written("config.json", b"{"), "config.json cannot be read"),
        (written("config.json", b"[1]"), "Unrecognized model"),
        (written("tokenizer.json", b"{"), "tokenizer.json cannot be read"),
        (
            written("tokenizer.json", b'{"a": 1}'),
            "the tokenizer cannot be loaded: KeyError 'added_tokens'",
        ),
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_files_are_one_line(
    damage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    damage(model)
    with pytest.raises(MisuseError, match=said) as caught:
        load_model(str(model))
    assert str(model) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_whole_folder_is_taken_as_it_is() -> None:
    assert locate(str(DEMO_MODEL_DIR)) == str(DEMO_MODEL_DIR)


def decode(
    tmp_path: Path, endpoint: str, name: str = "nobody/nothing"
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run `kvflow decode` with an empty cache; return the result and the seconds it took."""
    environment = {
        k: v
        for k, v in os.environ.items()
        if not k.lower().endswith("_proxy") and k != "HF_HUB_OFFLINE"
    }
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "kvflow", "decode", "--model-path", name, "--port", "0"]
    started = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=100
    )
    return done, time.monotonic() - started


def test_a_hub_that_refuses_connections_is_one_line_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, and not listening
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        done, seconds = decode(tmp_path, url)
    assert done.stderr == (
        "kvflow decode: error: model 'nobody/nothing' cannot be loaded: it is neither a directory "
        f"nor in the cache of the hub's client, and the hub at {url} does not answer: [Errno 111] "
        "Connection refused\n"
    )
    assert done.returncode == 2
    assert seconds < REQUEST_S


@pytest.mark.slow
def test_a_hub_that_never_answers_is_one_line_in_seconds(tmp_path: Path) -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        done, seconds = decode(tmp_path, f"http://127.0.0.1:{mute.getsockname()[1]}")
    assert done.stderr.endswith("does not answer: timed out\n") and done.stderr.count("\n") == 1
    assert done.returncode == 2
    assert seconds < REQUEST_S


def test_what_no_hub_can_have_is_one_line(tmp_path: Path) -> None:
    done, _ = decode(tmp_path, "http://127.0.0.1:9", "no body")
    assert done.stderr.startswith(
        "kvflow decode: error: model 'no body' is neither a directory nor a name on a hub: "
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_without_a_hub_the_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    snapshot = tmp_path / "models--some--body" / "snapshots" / ("0" * 40)
    shutil.copytree(DEMO_MODEL_DIR, snapshot)
    (tmp_path / "models--some--body" / "refs").mkdir()
    (tmp_path / "models--some--body" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("some/body") == str(snapshot)
    assert folder_of("some/body") == snapshot and folder_of(str(snapshot)) == snapshot


def test_a_document_that_the_system_does_not_let_us_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(MisuseError, match=r"config\.json cannot be read: .*Permission denied"):
        check_files(tmp_path)
