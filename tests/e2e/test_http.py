"""Real roles behind real HTTP: the official client, sglang_router, disconnects, and roles killed
under load.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio

from kvflow.config.sources import resolve
from kvflow.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.launch.supervisor import Fleet
from kvflow.transports.control.registry import RegistryClient
from kvflow.transports.control.zmq import connect_dealer
from tests.e2e.fleet import WITHIN_S, all_home, ask, running
from tests.e2e.sglang import sglang_router

pytestmark = pytest.mark.xdist_group("http")  # one fleet for the module
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as made:
        yield made


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as made:
        yield made


async def generate(session: aiohttp.ClientSession, url: str, **changes: Any) -> tuple[int, Any]:
    body = {
        "text": DEMO_PROMPTS[0],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        **changes,
    }
    async with session.post(f"{url}/generate", json=body) as answer:
        raw = await answer.read()
        return answer.status, (raw if changes.get("stream") else msgspec.json.decode(raw))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stranger_is_kept_from_the_control_link_of_a_fleet_that_was_given_no_key(
    fleet: Fleet,
) -> None:
    [info] = await RegistryClient().resolve(f"127.0.0.1:{fleet.prefills[0].bootstrap_port}")
    stranger = connect_dealer(info.control, 1)
    try:
        async with asyncio.timeout(WITHIN_S):
            while not (reason := stranger.lockout_reason):
                await asyncio.sleep(0.01)
        assert "requires a control key" in reason
    finally:
        stranger.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", max_retries=0
    ) as client:
        [model] = [model.id async for model in client.models.list()]
        messages: Any = [{"role": "user", "content": "What is a class?"}]
        plain = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0
        )
        text = plain.choices[0].message.content or ""
        stream = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=12, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert text
        assert "".join(parts) == text
        several = await client.completions.create(
            model=model, prompt=list(DEMO_PROMPTS[:2]), n=2, max_tokens=5, seed=7
        )
        assert len({choice.text for choice in several.choices}) > 1
        again = await client.completions.create(
            model=model, prompt=list(DEMO_PROMPTS[:2]), n=2, max_tokens=5, seed=7
        )
        assert [choice.text for choice in again.choices] == [
            choice.text for choice in several.choices
        ]
        scored = await client.completions.create(
            model=model, prompt=DEMO_PROMPTS[0], max_tokens=3, logprobs=2
        )
        logprobs = scored.choices[0].logprobs
        assert (
            logprobs is not None
            and logprobs.token_logprobs is not None
            and logprobs.top_logprobs is not None
        )
        assert all(value <= 0 for value in logprobs.token_logprobs)
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.completions.create(model=model, prompt="class " * 5000, max_tokens=1)


@pytest.mark.asyncio(loop_scope="module")
async def test_behind_sglang_router(fleet: Fleet) -> None:
    async with sglang_router(fleet) as url, aiohttp.ClientSession() as session:
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        _, direct = await generate(session, fleet.url)
        status, routed = await generate(session, url)
        assert (status, routed["output_ids"]) == (200, direct["output_ids"])
        status, raw = await generate(session, url, stream=True)
        assert status == 200
        events = [line[6:] for line in raw.decode().split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert msgspec.json.decode(events[-2])["output_ids"] == direct["output_ids"]
        _, scored = await generate(session, url, return_logprob=True)
        assert len(scored["meta_info"]["output_token_logprobs"]) == 8
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            messages: Any = [{"role": "user", "content": "What is a class?"}]
            chat = await client.chat.completions.create(
                model="default", messages=messages, max_tokens=4, temperature=0
            )
            assert chat.choices[0].message.content
            text = await client.completions.create(
                model="default", prompt=DEMO_PROMPTS[0], max_tokens=8, temperature=0
            )
            assert text.choices[0].text == direct["text"]
            # Both legs refuse by themselves: neither waits for the other.
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(openai.BadRequestError, match="regex is not supported"):
                    await client.completions.create(
                        model="default", prompt="a", extra_body={"regex": "a+"}
                    )
                with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
                    await client.completions.create(model="other", prompt="a")
        assert await all_home(session, prefill, decode)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_leaves_frees_its_pages(fleet: Fleet) -> None:
    prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
    async with aiohttp.ClientSession() as session:
        for stream in (True, False):
            request = asyncio.create_task(
                generate(session, fleet.url, stream=stream, sampling_params=LONG)
            )
            async with asyncio.timeout(WITHIN_S):
                while not (info := await ask(session, f"{decode}/server_info"))["running"]:
                    await asyncio.sleep(0.01)
            assert not info["pages"]["home"] and info["pages"]["sequence"], info["pages"]
            request.cancel()
            assert await all_home(session, prefill, decode)


@pytest.mark.asyncio(loop_scope="module")
async def test_clients_that_leave_do_not_hurt_their_neighbours(fleet: Fleet) -> None:
    """An abort during a model step ends one sequence of the batch, not the batch."""
    decode = fleet.decodes[0].url
    neighbourly = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        neighbour = asyncio.create_task(generate(session, fleet.url, sampling_params=neighbourly))
        for _ in range(20):
            leaver = asyncio.create_task(
                generate(session, fleet.url, stream=True, sampling_params=LONG)
            )
            async with asyncio.timeout(WITHIN_S):
                info = await ask(session, f"{decode}/server_info")
                while info["running"] < 2 and not neighbour.done():
                    await asyncio.sleep(0.001)
                    info = await ask(session, f"{decode}/server_info")
            leaver.cancel()
        status, answer = await asyncio.wait_for(neighbour, 30)
        assert status == 200, answer
        assert len(answer["output_ids"]) == 400
        assert await all_home(session, fleet.prefills[0].url, decode)


async def aborted(session: aiohttp.ClientSession, url: str, **body: Any) -> int:
    async with session.post(f"{url}/abort_request", json=body) as answer:
        assert answer.status == 200
        return int((await answer.json())["aborted"])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort_answers_with_what_there_is_and_frees_its_pages(
    fleet: Fleet, stream: bool
) -> None:
    prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
    async with aiohttp.ClientSession() as session:
        asked = [
            asyncio.create_task(
                generate(session, fleet.url, rid=rid, stream=stream, sampling_params=LONG)
            )
            for rid in ("first", "second", "third")
        ]
        async with asyncio.timeout(WITHIN_S):
            while (await ask(session, f"{decode}/server_info"))["running"] < 3:
                await asyncio.sleep(0.01)
        assert await aborted(session, fleet.url, rid="first") == 1
        answers = [await asyncio.wait_for(asked[0], WITHIN_S)]
        assert not asked[1].done() and not asked[2].done()
        assert await aborted(session, fleet.url, abort_all=True) == 2
        answers += [await asyncio.wait_for(other, WITHIN_S) for other in asked[1:]]
        for status, body in answers:
            assert status == 200
            events = body.decode().split("\n\n") if stream else []
            document = msgspec.json.decode(events[-3].removeprefix("data: ")) if stream else body
            assert document["meta_info"]["finish_reason"]["type"] == "abort"
            assert (
                document["meta_info"]["completion_tokens"]
                == len(document["output_ids"])
                < LONG["max_new_tokens"]
            )
        assert await all_home(session, prefill, decode)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_http2_preface_prints_nothing(fleet: Fleet) -> None:
    for child in fleet.children:
        before = list(child.last_lines)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(child.url.rsplit(":", 1)[1])
        )
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        assert b" 400 " in await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
        async with aiohttp.ClientSession() as session:  # whatever it had to say has been said
            assert (await ask(session, f"{child.url}/health"))["status"] == "ok"
        assert list(child.last_lines) == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill", "decode", "router"])
@pytest.mark.parametrize(
    ("num_pages", "backend"), [(512, "local"), (160, "mooncake")], ids=["for some", "for one"]
)
async def test_a_role_killed_under_load(
    victim: str, backend: str, num_pages: int, session: aiohttp.ClientSession
) -> None:
    """Clients get an answer, survivors get their pages back, within ten seconds; those that wait
    for pages too.
    """
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine")
    rate = 2 << 20  # slow enough that some rooms are in mid-transfer
    limits = {"transfer_rate_limit": rate, "num_pages": num_pages, "retry_timeout_s": 0.5}
    async with running(disaggregation_transfer_backend=backend, **limits) as fleet:
        roles = {child.role: child for child in fleet.children}
        long_prompt = " ".join(DEMO_PROMPTS) * 4
        loads = [
            asyncio.create_task(
                generate(
                    session,
                    fleet.url,
                    text=f"{long_prompt} {i}",
                    stream=bool(i % 2),
                    sampling_params=LONG,
                )
            )
            for i in range(8)
        ]
        async with asyncio.timeout(WITHIN_S):
            info = await ask(session, f"{roles['decode'].url}/server_info")
            while not info["running"]:
                await asyncio.sleep(0.01)
                info = await ask(session, f"{roles['decode'].url}/server_info")
        roles[victim].process.kill()
        survivors = [child.url for role, child in roles.items() if role not in (victim, "router")]
        # Who had not landed has an error now; who had landed goes on, until its client leaves.
        if victim == "prefill":
            await until_no_rooms(session, roles["decode"].url)
            done, landed = await asyncio.wait(
                loads, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED
            )
            for load in landed:
                load.cancel()
            await asyncio.wait(loads)
            assert done
        else:
            done, pending = await asyncio.wait(loads, timeout=WITHIN_S)
            assert not pending
        for load in done:
            error = load.exception()
            if error is not None:
                assert victim == "router" and isinstance(error, aiohttp.ClientError)
            else:
                status, answer = load.result()
                has_landed = victim == "prefill" and status == 200  # and has come to its end
                assert has_landed or status in (502, 503) or b'"error"' in answer, (status, answer)
        assert await all_home(session, *survivors)


async def until_no_rooms(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await ask(session, f"{url}/server_info"))["rooms"]:  # another process: no event
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_pools_that_do_not_fit_are_a_clear_error(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    config = tmp_path / "kvflow.toml"
    config.write_text("[prefill]\npage_size = 16\n[decode]\npage_size = 32\n")
    given = {"model_path": str(DEMO_MODEL_DIR), "port": 0, "num_pages": 64}
    settings = resolve("up", given, env={})
    async with Fleet(settings, given, str(config), quiet=True) as fleet:
        async with asyncio.timeout(WITHIN_S):
            status, answer = await generate(session, fleet.url)
        assert status == 502
        assert "page_size: prefill 16, decode 32" in answer["error"]["message"]
        assert await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)


async def test_up_ends_together_when_one_role_is_killed() -> None:
    command = (sys.executable, "-m", "kvflow.cli", "up", "--port", "0", "--num-pages", "64")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    async with asyncio.timeout(60):
        lines = [(await process.stdout.readline()).decode() for _ in range(3)]
        pids = {line.split()[0]: int(line.split()[-1]) for line in lines}
        assert set(pids) == {"prefill", "decode", "router"}
        os.kill(pids["decode"], signal.SIGKILL)
        _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"decode was killed by SIGKILL" in stderr
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


WITH_STORE = ("--prefix-cache", "lru", "--cache-host-bytes", str(1 << 24), "--l3", "mooncake")


@pytest.mark.parametrize(
    ("number", "more"),
    [
        pytest.param(signal.SIGINT, (), marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, WITH_STORE, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, (), marks=pytest.mark.slow),
    ],
)
async def test_up_leaves_no_orphan(number: signal.Signals, more: tuple[str, ...]) -> None:
    if more:
        pytest.importorskip("mooncake")
    command = (
        sys.executable,
        "-m",
        "kvflow.cli",
        "up",
        "--port",
        "0",
        "--num-pages",
        "64",
        "--decode-workers",
        "2",
    )
    process = await asyncio.create_subprocess_exec(
        *command, *more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        lines = [(await process.stdout.readline()).decode() for _ in range(5 if more else 4)]
        descriptors = [os.pidfd_open(int(line.split()[-1])) for line in lines]
        process.send_signal(number)
        status = await process.wait()
        assert status == (-number if number is signal.SIGKILL else 0)
        loop = asyncio.get_running_loop()
        for descriptor in descriptors:
            ended = asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
            loop.remove_reader(descriptor)
            os.close(descriptor)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_chat_example(fleet: Fleet) -> None:
    example = Path(__file__).parents[2] / "examples" / "chat.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(example),
        env={**os.environ, "KVFLOW_URL": fleet.url},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert out.strip()
