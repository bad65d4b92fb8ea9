"""Tiny models, built once per run."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from tests.serve.engine import tiny_models
from tests.serve.engine.stages import STAGES, Grouped, group
from tests.serve.engine.tiny_models import Expected, Generated, Loaded, Stock, Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("tiny")
    return lambda family: tiny_models.build(family, directory)


@pytest.fixture(scope="session")
def loaded(tiny: Tiny) -> Loaded:
    @functools.cache
    def load(family: str, dtype: str = "float32") -> LoadedModel:
        return load_model(str(tiny(family)), dtype)

    return load


@pytest.fixture(scope="session")
def stock(tiny: Tiny) -> Stock:
    @functools.cache
    def load(family: str) -> Any:
        return tiny_models.load_stock(tiny(family))

    return load


@pytest.fixture(scope="session")
def generated(stock: Stock) -> Generated:
    return Generated(stock)


@pytest.fixture(scope="session")
def llama(loaded: Loaded) -> LoadedModel:
    return loaded("llama")


@pytest.fixture
def stages(tiny: Tiny) -> Iterator[list[LoadedModel]]:
    """Both stages of the tiny llama, linked, before their first generation."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(STAGES) as threads:
        meeting = Meeting(Path(directory))
        path, parts = str(tiny("llama")), [ModelPart(stage, STAGES) for stage in range(STAGES)]
        loads = [threads.submit(load_model, path, part=part, meeting=meeting) for part in parts]
        found = [load.result(60) for load in loads]
        yield found
        for model in found:
            model.neighbours.close()


@pytest.fixture
def grouped(stages: list[LoadedModel], llama: LoadedModel) -> Grouped:
    return functools.partial(group, stages, llama)


@pytest.fixture
def expected(generated: Generated) -> Expected:
    return lambda prompt: generated("llama", prompt, 4)
