"""Tiny models on disk, what stock transformers makes of a prompt, and two processes that are
compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.parity_pair import ProcessPair
from tests.serve.engine import tiny_models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of a family's tiny model."""
    directory = tmp_path_factory.mktemp("tiny")
    return lambda family: tiny_models.build(family, directory)


@pytest.fixture(scope="session")
def expected(tiny: Callable[[str], Path]) -> Callable[[str, list[int], int], list[int]]:
    """`model.generate`, greedy, in fp32, one prompt at a time, in this process."""
    models: dict[str, Any] = {}
    known: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def generate(family: str, prompt: list[int], count: int) -> list[int]:
        key = (family, tuple(prompt), count)
        if key not in known:
            if family not in models:
                models[family] = tiny_models.load_stock(tiny(family))
            known[key] = tiny_models.generate(models[family], prompt, count)
        return known[key]

    return generate


@pytest.fixture(scope="session")
def pair() -> Iterator[ProcessPair]:
    """Its processes start with the first model. The modules that use it share a group."""
    found = ProcessPair()
    try:
        yield found
    finally:
        found.kill()


@pytest.fixture(scope="module", autouse=True)
def _forked_roles(forked_roles: None) -> None:
    """All roles of this folder are forked."""
