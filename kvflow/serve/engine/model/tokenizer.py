"""Loading the tokenizer that comes with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.quiet import explained
from kvflow.serve.engine.model.source import locate


def load_tokenizer(source: str, name: str) -> Any | None:
    """Load a tokenizer from a directory or a Hugging Face name.

    Returns None if there is no tokenizer. `name` appears in error messages.

    Raises: MisuseError if a directory has tokenizer files that cannot be loaded.
    """
    here = Path(source)
    if here.is_dir() and not any(here.glob("tokenizer*")) and not (here / "vocab.json").is_file():
        return None
    try:
        with explained(f"model {name!r}: the tokenizer cannot be loaded"):
            return AutoTokenizer.from_pretrained(source)
    except MisuseError:
        # A model on the hub may have no tokenizer, but tokenizer files in a directory must load.
        if not here.is_dir():
            return None
        raise


def find_tokenizer(name: str) -> Any | None:
    """Load a model's tokenizer without loading the model.

    `name` is a directory or a Hugging Face name. Returns None if the model has no tokenizer.

    Raises: MisuseError if the model cannot be found, or if the tokenizer files in its directory
    cannot be loaded.
    """
    here = Path(name).expanduser()
    return load_tokenizer(str(here) if here.is_dir() else locate(name), name)
