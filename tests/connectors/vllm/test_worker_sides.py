"""The sides of one vLLM worker: what a failed start leaves, and what a failed close does."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvflow
from kvflow.connectors import staging
from kvflow.connectors.vllm.settings import Settings
from kvflow.protocols.errors import LayoutError
from tests.connectors.vllm.worker_pair import ONE_GROUP, PAGES, new_pool

Patch = pytest.MonkeyPatch
SETTINGS = Settings(transfer_backend="local", staging="always", fingerprint="m")


@pytest.fixture
def module(monkeypatch: Patch) -> Any:
    """`worker_sides` without vLLM: one rank, over a pool of its own."""
    state: Any = ModuleType("vllm.distributed.parallel_state")
    alone = SimpleNamespace(rank_in_group=0, world_size=1)
    state.get_pp_group = state.get_tp_group = lambda: alone
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    found: Any = importlib.import_module("kvflow.connectors.vllm.worker_sides")
    monkeypatch.setattr(found, "caches_of", lambda *_: [{}])
    monkeypatch.setattr(found, "_pool", lambda *_: new_pool())
    monkeypatch.setattr(found, "check_moves", lambda *_: None)
    monkeypatch.setattr(found.WorkerSides, "_serve", lambda *_: None)
    return found


@pytest.fixture
def made(monkeypatch: Patch, module: Any) -> list[kvflow.Staging]:
    found: list[kvflow.Staging] = []

    def make(*args: Any, **options: Any) -> Any:
        found.append(original(*args, **options))
        return found[-1]

    original = module.make_staging
    monkeypatch.setattr(module, "make_staging", make)
    return found


def start(module: Any) -> Any:
    """Both roles."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            is_kv_producer=True, is_kv_consumer=True, kv_role="kv_both"
        ),
        model_config=SimpleNamespace(served_model_name="tiny", model="tiny", max_model_len=16),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    options = {"num_blocks": PAGES, "bootstrap_port": 1, "segment": None}
    return module.WorkerSides.start(config, SETTINGS, {}, ONE_GROUP, **options)


def is_freed(found: kvflow.Staging) -> bool:
    try:
        found.host.array("k")
    except LayoutError:
        return True
    return False


def fail(*_: Any, **__: Any) -> None:
    raise OSError("no thread is left")


@pytest.mark.parametrize("at", ["_decode_thread", "start", "_serve"])
def test_a_failed_start_leaves_nothing(
    monkeypatch: Patch, module: Any, made: list[kvflow.Staging], at: str
) -> None:
    owner = {"start": kvflow.DecodeThread, "_serve": module.WorkerSides}.get(at, module)
    monkeypatch.setattr(owner, at, fail)
    with pytest.raises(OSError, match="no thread is left"):
        start(module)
    assert len(made) == 2 and all(is_freed(each) for each in made) and not staging._kept


def test_a_loan_without_proof_keeps_the_staging(
    monkeypatch: Patch, module: Any, made: list[kvflow.Staging]
) -> None:
    sides = start(module)
    close = sides._decode.thread.close

    def unproven() -> list[str]:
        close()
        return ["a loan"]

    monkeypatch.setattr(sides._decode.thread, "close", unproven)
    sides.close()
    assert not any(is_freed(each) for each in made)
    assert {id(each) for each in staging._kept} == {id(each) for each in made}
    staging._kept.clear()
    for each in made:
        each.close()


def test_a_part_that_fails_to_close_leaves_no_other_open(
    monkeypatch: Patch, module: Any, made: list[kvflow.Staging]
) -> None:
    sides = start(module)
    status = SimpleNamespace(close=fail)
    sides._statuses.append(status)
    with pytest.raises(OSError, match="no thread is left"):
        sides.close()
    assert sides._decode._closed and sides._prefill.sides[0]._closed
    assert all(is_freed(each) for each in made)
