"""The files of a model, and digests of their content. Engines compare digests to check that they
serve the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from kvflow.protocols.errors import MisuseError

# Samples are spread evenly over each weight, so that two fine-tunes have different digests.
STRETCHES, STRETCH_BYTES = 16, 64
# Except for the dtypes, these keys do not change the KV of a prompt. Engines compare the dtype that
# they loaded instead of the configured one.
_IRRELEVANT = frozenset(
    {
        *(
            "_name_or_path",
            "_commit_hash",
            "transformers_version",
            "torch_dtype",
            "dtype",
            "use_cache",
            "auto_map",
        ),
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "id2label",
            "label2id",
            "initializer_range",
        ),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        *("output_attentions", "output_hidden_states"),
    }
)


def folder_of(source: str) -> Path:
    """Return the local folder of the model `source`, which is a folder or a name on a hub.

    A model on a hub must already be downloaded.
    """
    from huggingface_hub import snapshot_download

    folder = Path(source).expanduser()
    return folder if folder.is_dir() else Path(snapshot_download(source, local_files_only=True))


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers would load; empty if there are none.

    Safetensors take precedence. Weights are in one file, or in several files that an index lists.
    """
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.is_file():
            return [
                folder / shard
                for shard in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            ]
    return []


def config_digest(config: dict[str, Any]) -> str:
    """Return a digest (8 hex digits) of a config.json without the keys in `_IRRELEVANT`.

    The order of the keys does not matter.
    """
    return hashlib.sha256(
        json.dumps(_relevant(config), sort_keys=True, default=str).encode()
    ).hexdigest()[:8]


def weights_digest(name: str) -> str:
    """Return a digest of 12 hex digits over name, type, shape and some bytes of every weight.

    The function reads little data, even from a large model. Raises: MisuseError if the model has no
    weights.
    """
    folder = folder_of(name)
    files = weight_files(folder)
    if not files:
        raise MisuseError(
            f"model {name!r}: no weights in {folder}: neither safetensors nor pytorch_model.bin"
        )
    samples: dict[str, bytes] = {}
    for path in files:
        samples.update(_of_safetensors(path) if path.suffix == ".safetensors" else _of_pickle(path))
    digest = hashlib.sha256()
    for _, sample in sorted(samples.items()):
        digest.update(sample)
    return digest.hexdigest()[:12]


def _of_safetensors(path: Path) -> Iterator[tuple[str, bytes]]:
    # In a mapped file the kernel would read ahead; `pread` reads only the samples.
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        header_bytes = int.from_bytes(file.read(8), "little")
        for name, found in json.loads(file.read(header_bytes)).items():
            if name != "__metadata__":
                first, end = found["data_offsets"]
                pieces = [
                    os.pread(file.fileno(), count, 8 + header_bytes + first + at)
                    for at, count in _places(end - first)
                ]
                yield (
                    name,
                    f"{name} {found['dtype']} {found['shape']}\n".encode() + b"".join(pieces),
                )


def _of_pickle(path: Path) -> Iterator[tuple[str, bytes]]:
    import torch

    for name, weight in torch.load(
        path, map_location="cpu", weights_only=True, mmap=is_zipfile(path)
    ).items():
        flat = weight.detach().reshape(-1).view(torch.uint8).numpy()
        pieces = [flat[at : at + count].tobytes() for at, count in _places(flat.size)]
        yield name, f"{name} {weight.dtype} {list(weight.shape)}\n".encode() + b"".join(pieces)


def _places(size: int) -> list[tuple[int, int]]:
    if size <= STRETCHES * STRETCH_BYTES:
        return [(0, size)]
    return [
        (i * (size - STRETCH_BYTES) // (STRETCHES - 1), STRETCH_BYTES) for i in range(STRETCHES)
    ]


def _relevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _relevant(inner) for key, inner in value.items() if key not in _IRRELEVANT}
    return value
