"""Tiny models on disk, what stock transformers makes of a prompt, and two processes that are
compared with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.e2e.parity_pair import ProcessPair
from tests.serve.engine import tiny_models
from tests.serve.engine.tiny_models import Generated, Tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Path of a family's tiny model."""
    directory = tmp_path_factory.mktemp("tiny")
    return lambda family: tiny_models.build(family, directory)


@pytest.fixture(scope="session")
def expected(tiny: Tiny) -> Generated:
    """What stock transformers generates, in this process."""
    return Generated(functools.cache(lambda family: tiny_models.load_stock(tiny(family))))


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
