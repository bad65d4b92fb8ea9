"""What can be known to be wrong before a model is loaded is refused before, not seconds later."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from kvflow.memory.available import Available
from kvflow.protocols.errors import MisuseError
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import ConfigError
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch import pool
from kvflow.serve.launch.roles import run_decode, run_prefill
from kvflow.serve.launch.router import run_router

Role = Callable[[Settings], Awaitable[None]]
HUGE = 1 << 60


async def refusal_of(run: Role, model: Path, **settings: Any) -> str:
    with pytest.raises(MisuseError) as caught:
        await run(Settings(model_path=str(model), disaggregation_bootstrap_port=0, **settings))
    return str(caught.value)


@pytest.mark.parametrize("run", [run_prefill, run_decode])
async def test_a_device_that_is_not_there(run: Role, tmp_path: Path) -> None:
    """The folder holds no model, which would be noticed next."""
    assert str(tmp_path) in await refusal_of(run, tmp_path, device="cpu")
    assert "--device cuda:999: it is not there; torch" in await refusal_of(
        run, tmp_path, device="cuda:999"
    )


async def test_a_store_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = {"prefix_cache": "lru", "cache_host_bytes": 1 << 20, "l3": "mooncake"}
    told = await refusal_of(run_prefill, tmp_path, **store, mooncake_master="nowhere")
    assert told.startswith(
        "--l3 mooncake --mooncake-master nowhere: master 'nowhere' is not host:port"
    )
    told = await refusal_of(
        run_prefill, tmp_path, **store, mooncake_master="http://127.0.0.1:50051"
    )
    assert "master 'http://127.0.0.1:50051' is not host:port" in told
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mooncake" else real(name)
    )
    told = await refusal_of(run_decode, tmp_path, **store, mooncake_master="127.0.0.1:50051")
    assert told.endswith("mooncake is not installed: pip install 'kvflow[mooncake]'")


async def test_a_tokenizer_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(MisuseError, match=r"--tokenizer-path: .*the tokenizer cannot be loaded"):
        await run_router(Settings(tokenizer_path=str(tmp_path)))
    # Its own client would go on for a minute.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        MisuseError,
        match=r"--tokenizer-path: .*neither a directory nor in the cache.*HF_HUB_OFFLINE",
    ):
        await run_router(Settings(tokenizer_path="nobody/nothing"))


async def test_host_memory_that_is_not_there(tmp_path: Path) -> None:
    told = await refusal_of(run_decode, tmp_path, host_memory_bytes=HUGE)
    assert f"--host-memory-bytes {HUGE}: " in told and "bytes are available (" in told
    assert str(tmp_path) in await refusal_of(
        run_decode, tmp_path, host_memory_bytes=HUGE, new_token_ratio=1.0
    )


@pytest.mark.parametrize("run", [run_prefill, run_decode])
async def test_a_prefix_cache_that_cannot_be(run: Role, tmp_path: Path) -> None:
    told = await refusal_of(run, tmp_path, prefix_cache="lru", cache_host_bytes=HUGE)
    assert told.startswith(f"--cache-host-bytes {HUGE}: ") and "bytes are available (" in told
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        for events in (
            {"endpoint": address},
            {"endpoint": "tcp://*:*", "replay_endpoint": address},
        ):
            told = await refusal_of(
                run, tmp_path, prefix_cache="lru", kv_events_config=json.dumps(events)
            )
            assert told == f"--kv-events-config: {address} is in use"


def test_a_default_of_host_memory_that_is_not_there_is_no_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "available_memory", lambda: Available(1000, "memory of the machine"))
    pool.check_host_memory(Settings())
    with pytest.raises(
        ConfigError, match=r"--host-memory-bytes 268435456: 1000 bytes are available \(memory of"
    ):
        pool.check_host_memory(Settings(host_memory_full="refuse"))


@pytest.mark.parametrize("run", [run_prefill, run_decode])
async def test_a_chat_template_that_is_not_there(run: Role, tmp_path: Path) -> None:
    told = await refusal_of(run, tmp_path, chat_template="/nowhere/chat.jinja")
    assert told == "--chat-template /nowhere/chat.jinja: No such file or directory"


@pytest.mark.parametrize("run", [run_prefill, run_decode])
async def test_a_role_that_cannot_serve_ends_without_noise(
    run: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """The role runs by then, so it must be closed before its model is."""
    told = await refusal_of(run, DEMO_MODEL_DIR, chat_template="{% for %}", num_pages=8)
    assert told.startswith("--chat-template: line 1: ")
    await asyncio.get_running_loop().shutdown_asyncgens()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
