"""Loading the tokenizer that lies beside a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.model.quiet import explained
from kvflow.serve.engine.model.source import locate


def load_tokenizer(source: str, name: str) -> Any | None:
    """Load a tokenizer from a directory or a Hugging Face name; None for a model without one.

    `name` is for errors.

    Raises: MisuseError for one that cannot be loaded.
    """
    here = Path(source)
    if here.is_dir() and not any(here.glob("tokenizer*")) and not (here / "vocab.json").is_file():
        return None
    try:
        with explained(f"model {name!r}: the tokenizer cannot be loaded"):
            return AutoTokenizer.from_pretrained(source)
    except MisuseError:
        # A name on a hub may have no tokenizer, and transformers raises then. In a directory with
        # tokenizer files the error is real.
        if not here.is_dir():
            return None
        raise


def find_tokenizer(name: str) -> Any | None:
    """Load the tokenizer of a model without the model; None for a model without one.

    `name` is a directory or a Hugging Face name.

    Raises: MisuseError for one that cannot be loaded, or a hub that does not answer.
    """
    here = Path(name).expanduser()
    return load_tokenizer(str(here) if here.is_dir() else locate(name), name)
