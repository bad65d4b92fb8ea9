"""What does not fit together is refused, and whoever can mend it is told why."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engines import eventually, stop_all
from tests.vllm.asking import ask, ask_prefill, is_empty, one_after_the_other
from tests.vllm.conftest import Fleet
from tests.vllm.models import make_model
from tests.vllm.servers import BLOCK, VENV, Server

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(480)]
Session = aiohttp.ClientSession
PROMPT = list(range(5, 5 + 3 * BLOCK))
FROM_PREFILL = {
    "do_remote_prefill": True,
    "kvflow_room": 7,
    "remote_host": "127.0.0.1",
    "remote_port": 8998,
}


MOVED = (
    "full",
    "full, with a window",
    "MLA",
    "several layers",
    "a window",
    "full and a window",
    "states and full",
)
of_one_family = pytest.mark.parametrize("fleet", ["llama"], indirect=True)


@of_one_family
@pytest.mark.parametrize(
    ("leg", "params", "field"),
    [
        ("prefill", {"do_remote_decode": 1}, "do_remote_decode"),
        ("prefill", {"do_remote_decode": True, "do_remote_prefill": True}, "do_remote_decode"),
        ("prefill", {"do_remote_decode": True, "kvflow_room": 1 << 53}, "kvflow_room"),
        ("prefill", FROM_PREFILL, "do_remote_prefill"),
        ("decode", {"do_remote_decode": True}, "do_remote_decode"),
        ("decode", FROM_PREFILL | {"kvflow_room": None}, "kvflow_room"),
        ("decode", FROM_PREFILL | {"remote_host": ""}, "remote_host"),
        ("decode", FROM_PREFILL | {"remote_port": 65536}, "remote_port"),
        ("decode", FROM_PREFILL | {"remote_bootstrap_addr": "nowhere"}, "remote_bootstrap_addr"),
    ],
)
async def test_a_wrong_field_is_named(
    session: Session, fleet: Fleet, leg: str, params: dict[str, Any], field: str
) -> None:
    answer = await ask(session, getattr(fleet, leg).url, PROMPT, 1, params)
    assert answer.status == 400 and f"kv_transfer_params: {field}" in answer.text, answer.text


@of_one_family
@pytest.mark.parametrize(
    ("prefill", "reason"), [("large_blocks", "64"), ("slow_prefill", "weights")]
)
async def test_a_prefill_that_does_not_fit_is_refused(
    session: Session, fleet: Fleet, prefill: str, reason: str
) -> None:
    """Its blocks are of another size; it has other weights."""
    for _ in range(2):  # before and after both know each other
        answer = await one_after_the_other(
            session, getattr(fleet, prefill), fleet.decode, PROMPT, 4
        )
        assert answer.status == 502 and "kvflow" in answer.text and reason in answer.text, (
            answer.text
        )
    for server in (getattr(fleet, prefill), fleet.decode):
        await eventually(partial(is_empty, session, server), f"{server.name} gives everything back")


@of_one_family
async def test_a_prefill_that_is_not_there_is_an_error_soon(session: Session, fleet: Fleet) -> None:
    params = await ask_prefill(session, fleet.prefill, PROMPT)
    answer = await ask(session, fleet.decode.url, PROMPT, 4, params | {"remote_port": 1})
    assert answer.status >= 500 and "127.0.0.1:1" in answer.text, answer.text


def test_a_vllm_that_cannot_serve_says_why(
    model_of: Callable[..., Path], logs: Path, tmp_path: Path
) -> None:
    version = (
        "import sys, types\nsys.modules['vllm._version'] = types.ModuleType('vllm._version')\n"
    )
    version += (
        "vars(sys.modules['vllm._version']).update(__version__='0.34.0', __version_tuple__=(0, 34, "
        "0))\n"
    )
    (tmp_path / "sitecustomize.py").write_text(version)
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        reference_mla = ("--attention-backend", "CPU_MLA")  # what a CPU without AMX has
        servers = [
            Server("prefill", model_of(1), logs, name="other_version", environment=path),
            Server("prefill", model_of(1), logs, name="taken_port", bootstrap_port=port),
            Server("prefill", model_of(1), logs, name="bad_field", bootstrap_prot=1),
            Server(
                "decode",
                make_model("deepseek_v2", tmp_path / "mla"),
                logs,
                *reference_mla,
                name="mla_on_a_cpu",
            ),
        ]
        said = (
            "vLLM 0.32 to 0.33, and vLLM 0.34.0 is installed",
            f"bootstrap_port of worker 0: the registry cannot listen on 127.0.0.1:{port}",
            "unknown field `bootstrap_prot`",
            "vLLM has switched chunked prefill and prefix caching off here",
        )
        try:
            for server in servers:
                server.start()
            for text, server in zip(said, servers, strict=True):
                assert server.wait_end() != 0
                assert text in server.log.read_text(), server.tail()
            for server in servers[2:]:
                assert "(EngineCore" not in server.log.read_text(), (
                    "it was told only when the engine had been started"
                )
        finally:
            stop_all(servers)


def test_only_what_is_known_is_moved(model_of: Callable[..., Path]) -> None:
    """By vLLM's own classes, and those that derive from what is moved."""
    model_of(1)  # skips where there is no vLLM
    root = Path(__file__).parents[2]
    program = [str(VENV / "bin/python"), str(root / "tests/vllm/specs.py")]
    found = subprocess.run(
        program,
        check=False,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    refused = json.loads(found.stdout.splitlines()[-1])
    for name in MOVED:
        assert refused.pop(name) is None
    assert all(refused.values()), refused
    assert "causal" in refused["not causal"] and "RSWASpec" in refused["a window over answers"]
    assert "ChunkedLocalAttentionSpec" in refused["full and chunks"]
