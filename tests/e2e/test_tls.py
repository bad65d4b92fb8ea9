"""A fleet that serves HTTPS at every port: the official client, who is refused, and renewal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from kvflow.http.authorization import bearer
from kvflow.http.listening import bound_socket
from kvflow.http.tls import ClientContext
from kvflow.protocols.errors import LostError, MisuseError, WireError
from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.child import Child
from kvflow.serve.launch.supervisor import Fleet, run_up
from kvflow.transports.control.registry import RegistryClient
from tests.certificates import Authority, Files
from tests.e2e.fleet import WITHIN_S, ask, running

pytestmark = pytest.mark.xdist_group("processes")
HOST, KEY, ADMIN = "127.0.0.1", "sesame", "simsim"
SETTINGS = {"served_model_name": "kvflow", "api_key": KEY, "admin_api_key": ADMIN}
CHAT: Any = [{"role": "user", "content": DEMO_PROMPTS[0]}]


@pytest.mark.slow
async def test_a_fleet_serves_https_at_every_port(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("server", HOST)
    Authority(tmp_path / "other")
    strange = str(tmp_path / "other/ca.pem")
    first = _two_free_ports()
    async with running(**SETTINGS, **files.flags(), worker_ports=first) as fleet:
        workers = [*fleet.prefills, *fleet.decodes]
        assert [one.url for one in workers] == [f"https://{HOST}:{first + n}" for n in range(2)]
        trust = ClientContext(files.authority)
        connector = aiohttp.TCPConnector(ssl=trust)
        async with aiohttp.ClientSession(connector=connector, headers=bearer(ADMIN)) as session:
            for child in fleet.children:
                assert child.url.startswith(f"https://{HOST}:")
                async with session.get(f"{child.url}/health") as answer:
                    assert answer.status == 200
            await _registry(fleet, trust, ClientContext(strange))
            await _the_official_client(fleet.url, files.authority, strange)
            await _a_worker_joins(fleet, files, session)
            await _declare_dead(fleet.decodes[0].url, files.authority)
            before = await _serials(fleet)
            authority.issue("server", HOST)
            after = await _serials(fleet)
            assert len(set(before)) == len(set(after)) == 1 and before != after
            # The roles still serve each other, by new connections too.
            await _the_official_client(fleet.url, files.authority, strange)


def _two_free_ports() -> int:
    """Return the first of two ports that the kernel chooses for no other process."""
    for first in range(random.randrange(20000, 30000), 32000):
        with contextlib.suppress(MisuseError):
            for port in (first, first + 1):
                bound_socket(HOST, port, "--worker-ports").close()
            return first
    raise AssertionError("no two free ports")


async def _the_official_client(url: str, trusted: str, strange: str) -> None:
    async with _client(url, trusted) as client:
        chat = await client.chat.completions.create(
            model="kvflow", messages=CHAT, max_tokens=8, temperature=0
        )
        stream = await client.chat.completions.create(
            model="kvflow", messages=CHAT, max_tokens=8, temperature=0, stream=True
        )
        pieces = [piece.choices[0].delta.content or "" async for piece in stream if piece.choices]
        assert chat.choices[0].message.content == "".join(pieces) != ""
    async with _client(url, strange) as client:
        with pytest.raises(openai.APIConnectionError) as caught:
            await client.models.list()
        assert "CERTIFICATE_VERIFY_FAILED" in repr(caught.value.__cause__)
    async with _client(url.replace("https", "http"), trusted) as client:
        with pytest.raises(openai.BadRequestError, match="use an https:// URL"):
            await client.chat.completions.create(model="kvflow", messages=CHAT)


def _client(url: str, trusted: str) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=trusted))
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=http)


async def _registry(fleet: Fleet, trust: ssl.SSLContext, strange: ssl.SSLContext) -> None:
    place = f"{HOST}:{fleet.prefills[0].bootstrap_port}"
    [info] = await RegistryClient(KEY, tls=trust).resolve(place)
    assert info.world_size == 1
    with pytest.raises(LostError, match="certificate verify failed"):
        await RegistryClient(KEY, tls=strange).resolve(place)
    with pytest.raises(WireError, match="use an https:// URL"):
        await RegistryClient(KEY).resolve(place)


async def _a_worker_joins(fleet: Fleet, files: Files, session: aiohttp.ClientSession) -> None:
    flags = ["--tls-cert", files.certificate, "--tls-key", files.key, "--tls-ca", files.authority]
    pool = ["--model-path", str(DEMO_MODEL_DIR), "--served-model-name", "kvflow"]
    pool += ["--num-pages", "64", "--dtype", "float32"]
    joins = ["--port", "0", "--join", fleet.url, *pool, *flags]
    worker = Child("decode", "decode", joins, quiet=True)
    keys = {"KVFLOW_API_KEY": KEY, "KVFLOW_ADMIN_API_KEY": ADMIN}
    await worker.start({**os.environ, **keys}, 60)
    try:
        async with asyncio.timeout(WITHIN_S):
            while worker.url not in await _urls(fleet, session):
                await asyncio.sleep(0.05)
    finally:
        await worker.stop(10)
    assert worker.url.startswith("https://")


async def _urls(fleet: Fleet, session: aiohttp.ClientSession) -> list[str]:
    found = await ask(session, f"{fleet.url}/workers")
    return [worker["url"] for worker in found["workers"] if worker["is_healthy"]]


async def _declare_dead(url: str, trusted: str) -> None:
    """The server's own refusal arrives, because nobody has this incarnation."""
    for authority, why in (([], "certificate verify failed"), (["--tls-ca", trusted], "refused")):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvflow.cli", "declare-dead", "--url", url, *authority, "12"),
            env={**os.environ, "KVFLOW_ADMIN_API_KEY": ADMIN},
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        assert process.returncode and why in said.decode()


async def _serials(fleet: Fleet) -> list[bytes]:
    """The certificates that every HTTP port shows, registry included."""
    ports = [int(child.url.rpartition(":")[2]) for child in fleet.children]
    return [
        await asyncio.to_thread(_shown, port)
        for port in (*ports, *(child.bootstrap_port or 0 for child in fleet.prefills))
    ]


def _shown(port: int) -> bytes:
    return ssl.get_server_certificate((HOST, port), timeout=10).encode()


@pytest.mark.parametrize(
    ("name", "is_trusted", "why"),
    [
        (HOST, False, "unable to get local issuer certificate"),
        ("fleet.example", True, "not valid for '127.0.0.1'"),
    ],
)
async def test_up_says_at_once_that_its_roles_would_not_trust_each_other(
    tmp_path: Path, name: str, is_trusted: bool, why: str
) -> None:
    flags = Authority(tmp_path).issue("server", name).flags()
    given = {"port": 0, **flags} if is_trusted else {"port": 0, **flags, "tls_ca": ""}
    with pytest.raises(MisuseError, match=f"--tls-cert .*, which meet at 127.0.0.1, .*{why}"):
        await run_up(resolve("up", given, env={}), given, None)
