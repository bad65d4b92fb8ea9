"""Locating a model: in a local folder, on a hub, or in the cache of the hub's client."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path

from huggingface_hub import constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from kvflow.protocols.errors import MisuseError

# Time limit for one request to the hub. The hub's own client would retry for most of a minute.
HUB_TIMEOUT_S = 5.0
_DOCUMENTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)
_LFS_POINTER = b"version https://git-lfs"


def locate(name: str) -> str:
    """Return what transformers should load: a checked folder, or the name of a model on the hub.

    If the hub does not answer, or HF_HUB_OFFLINE is set, the result is the model's folder in the
    cache of the hub's client.

    Raises: MisuseError if the model is not found, or if its files are broken.
    """
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise MisuseError(f"model path {name!r} has no config.json")
        check_files(folder)
        return str(folder)
    looks_local = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or not name
    if looks_local or folder.exists():
        raise MisuseError(f"model path {name!r} does not exist or is not a directory")
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_answer(name)
    if not reason:
        return name
    try:
        cached = snapshot_download(name, local_files_only=True)
    except LocalEntryNotFoundError:
        raise MisuseError(
            f"model {name!r} cannot be loaded: it is neither a directory nor in the cache of the "
            f"hub's client, and {reason}"
        ) from None
    check_files(Path(cached))
    return cached


def check_files(folder: Path) -> None:
    """Check the JSON files and the weights in a model's folder.

    Raises: MisuseError, which names the file, for broken JSON and for truncated or missing weights.
    """
    documents = [folder / name for name in _DOCUMENTS if (folder / name).is_file()]
    for path in (*documents, *sorted(folder.glob("model*.safetensors"))):
        try:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            else:
                _open_weights(path)
        except (OSError, ValueError, SafetensorError) as error:
            text = " ".join(str(error).split())
            raise MisuseError(
                f"model path {str(folder)!r}: {path.name} cannot be read: {text}"
            ) from None
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        _check_shards(folder, json.loads(index.read_bytes()))


def _open_weights(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError("it is a pointer of Git LFS; fetch the weights with git lfs pull")
    # Opening the file reads the header and compares the file's size with it.
    with safe_open(str(path), framework="numpy"):
        pass


def _check_shards(folder: Path, index: object) -> None:
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise MisuseError(
            f"model path {str(folder)!r}: model.safetensors.index.json has no weight_map"
        )
    missing = sorted(
        {str(shard) for shard in shards.values() if not (folder / str(shard)).is_file()}
    )
    if missing:
        total = len(set(map(str, shards.values())))
        raise MisuseError(
            f"model path {str(folder)!r}: {len(missing)} of {total} files of weights are missing, "
            f"{missing[0]} is one"
        )


def _no_answer(name: str) -> str:
    """Send one short request to the hub; return why it cannot be reached, or an empty string.

    Raises: MisuseError if `name` is not a valid name on a hub.
    """
    try:
        request = urllib.request.Request(hf_hub_url(name, "config.json"), method="HEAD")
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S):
            return ""
    except HFValidationError as error:
        raise MisuseError(
            f"model {name!r} is neither a directory nor a name on a hub: {error}"
        ) from None
    except urllib.error.HTTPError:
        return ""
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        # The hub's client may trust certificates that urllib does not, so let it try.
        if isinstance(cause, ssl.SSLError):
            return ""
        return f"the hub at {constants.ENDPOINT} does not answer: {cause or type(cause).__name__}"
