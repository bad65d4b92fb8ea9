"""Tiny models, built once per run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from tests.engine import tiny_models
from tests.engine.stages import STAGES


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


@pytest.fixture
def stages(tiny: Callable[[str], Path]) -> Iterator[list[LoadedModel]]:
    """Both stages of the tiny llama, with a way of hidden states between them, which knows no
    generation yet.
    """
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(STAGES) as threads:
        meeting = Meeting(Path(directory))
        path, parts = str(tiny("llama")), [ModelPart(stage, STAGES) for stage in range(STAGES)]
        loads = [threads.submit(load_model, path, part=part, meeting=meeting) for part in parts]
        found = [load.result(60) for load in loads]
        yield found
        for model in found:
            model.neighbours.close()
