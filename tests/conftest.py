"""What all tests share: one thread, one printed seed, uvloop."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import uvloop

if TYPE_CHECKING:
    import asyncio

    from tests.forked_roles import Nursery

# Before a conftest imports it: modules that name it as a plugin could not have it rewritten then.
pytest.register_assert_rewrite("kvflow.testing.fixtures")
# Before anything imports torch: more threads than cores make every timing and every timeout a
# matter of luck.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("KVFLOW_DEVICE", "cpu")  # what needs another says so: tests/gpu
# How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile("kvflow", deadline=None)
hypothesis.settings.load_profile("kvflow")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help="seed of all random tests (default: KVFLOW_SEED or random)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        # A worker of xdist uses the seed of the process that printed it.
        given = getattr(config, "workerinput", {}).get("seed") or os.environ.get("KVFLOW_SEED")
        config.option.seed = int(given or random.SystemRandom().randrange(2**32))
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.option.seed)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a worker of xdist."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes some 700,000 objects, and all of them live to the end.

    A full collection, which several tests ask for, takes a third of a second to look at them; it
    passes over what is frozen."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    # Only now: importing torch takes seconds.
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no accelerator"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure is told by parsing its source.

    Before Python 3.11.8 that fails, and the whole run with it, when the collector runs a finalizer
    meanwhile whose own traceback is told (cpython issue 106905)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, printed in the header."""
    value: int = request.config.option.seed
    return value


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    # Few tests need it, and it imports half of the command line.
    from tests.forked_roles import Nursery

    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="module")
def forked_roles(nursery: Nursery) -> Iterator[None]:
    """Prefills and decodes of the module's tests are forked, and import nothing anew."""
    from tests.forked_roles import forking

    with forking(nursery):
        yield


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    random.seed(request.config.option.seed)
