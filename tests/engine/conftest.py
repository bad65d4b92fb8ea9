"""Tiny models, built once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvflow.engine.model.load import LoadedModel, load_model
from tests.engine import tiny_models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a family's tiny model."""
    directory = tmp_path_factory.mktemp("tiny")
    return lambda family: tiny_models.build(family, directory)


@pytest.fixture(scope="session")
def loaded(tiny: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """A family's tiny model on kvflow, loaded once per dtype."""
    found: dict[tuple[str, str], LoadedModel] = {}

    def load(family: str, dtype: str = "float32") -> LoadedModel:
        if (family, dtype) not in found:
            found[family, dtype] = load_model(str(tiny(family)), dtype)
        return found[family, dtype]

    return load


@pytest.fixture(scope="session")
def stock(tiny: Callable[[str], Path]) -> Callable[[str], Any]:
    """The same without kvflow."""
    found: dict[str, Any] = {}

    def load(family: str) -> Any:
        if family not in found:
            found[family] = tiny_models.load_stock(tiny(family))
        return found[family]

    return load


@pytest.fixture(scope="session")
def llama(loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded("llama")
