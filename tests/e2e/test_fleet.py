"""A fleet that changes under load: workers are killed, restarted, drained, join, leave and switch
their role, while requests of two kinds of clients are answered, each compared with what stock
transformers makes of its prompt."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from kvflow.http.authorization import Keys, bearer
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from tests.e2e.service import START_S, Service, serving
from tests.e2e.sglang import router_over
from tests.ports import free_port
from tests.serve.engine import tiny_models
from tests.soak import sized

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets"), pytest.mark.timeout(900)]

KEYS = Keys("sesame", "open sesame")
CLIENTS, REQUESTS, TOKENS = sized(4, 8), sized(100, 1000), 24
SERVED = sized(3, 10)  # by each worker before the next one is disturbed
# As many bytes/s as make a worker that is killed leave transfers behind.
RATE = 1 << 19
REST_S = 20.0
Disturb = Callable[[], Awaitable[None]]


class Prompt(NamedTuple):
    ids: list[int]
    expected: list[int]
    text: str  # of what is expected


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Two a prompt of the demo model, with their greedy continuations, made before anything is
    served.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    stock = tiny_models.load_stock(DEMO_MODEL_DIR)
    made = []
    for prompt, number in itertools.product(DEMO_PROMPTS, range(2)):
        ids = tokenizer.encode(f"{prompt} {number}" if number else prompt)
        expected = tiny_models.generate(stock, ids, TOKENS)
        made.append(Prompt(ids, expected, tokenizer.decode(expected, skip_special_tokens=True)))
    return made


class Ended(NamedTuple):
    """How a request ended: "done", "wrong", or the error that its client got; `tokens` it had by
    then.
    """

    how: str
    tokens: int = 0
    message: str = ""
    seconds: float = 0.0


class Client:
    """Asks, each other request as a stream, and compares."""

    def __init__(self, session: aiohttp.ClientSession, url: str, prompts: list[Prompt]) -> None:
        self._session, self._url, self._prompts = session, url, prompts

    async def ask(self, number: int) -> Ended:
        prompt, stream = self._prompts[number % len(self._prompts)], bool(number % 2)
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt.ids, "sampling_params": sampling, "stream": stream}
        try:
            async with self._session.post(f"{self._url}/generate", json=body) as answer:
                if answer.status != 200:
                    text = await answer.text()
                    return Ended(
                        " ".join([str(answer.status), *re.findall(r'"code": ?"(\w+)"', text)]),
                        message=text,
                    )
                if stream:
                    return await self._streamed(answer, prompt)
                return _compared(
                    msgspec.json.decode(await answer.read())["output_ids"], prompt.expected
                )
        except (aiohttp.ClientError, msgspec.DecodeError) as error:
            return Ended(type(error).__name__, message=str(error))

    async def _streamed(self, answer: aiohttp.ClientResponse, prompt: Prompt) -> Ended:
        got: list[int] = []
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                return _compared(got, prompt.expected)
            event = msgspec.json.decode(line[6:])
            if "error" in event:
                return Ended(f"event {event['error']['code']}", len(got), event["error"]["message"])
            got = event["output_ids"]
            if got != prompt.expected[: len(got)]:
                return Ended("wrong", len(got), str(got))
        return Ended("cut off", len(got))


class OpenAIClient:
    """The same by the official client."""

    def __init__(self, client: openai.AsyncOpenAI, prompts: list[Prompt]) -> None:
        self._client, self._prompts = client, prompts

    async def ask(self, number: int) -> Ended:
        prompt = self._prompts[number % len(self._prompts)]
        asked: Any = {
            "model": "default",
            "prompt": prompt.ids,
            "max_tokens": TOKENS,
            "temperature": 0,
        }
        asked["extra_body"] = {"ignore_eos": True}
        text = ""
        try:
            if number % 2:
                async for chunk in await self._client.completions.create(**asked, stream=True):
                    text += "".join(choice.text for choice in chunk.choices)
            else:
                text = (await self._client.completions.create(**asked)).choices[0].text
        except openai.APIStatusError as error:
            return Ended(f"{error.status_code} {error.code}", message=str(error))
        except openai.APIError as error:  # an error event of a stream
            return Ended(f"event {error.code}", len(text), error.message)
        return Ended("done" if text == prompt.text else "wrong", TOKENS, text)


def _compared(got: list[int], expected: list[int]) -> Ended:
    return Ended(
        "done" if got == expected else "wrong", len(got), "" if got == expected else str(got)
    )


async def under_load(clients: Sequence[Client | OpenAIClient], disturb: Disturb) -> list[Ended]:
    """At least `REQUESTS`, and more until `disturb` is through; each is answered. `CLIENTS` clients
    ask, of each of these kinds in turn.
    """
    numbers, ended = itertools.count(), list[Ended]()
    disturbing = asyncio.ensure_future(disturb())

    async def go_on(client: Client | OpenAIClient) -> None:
        while len(ended) < REQUESTS or not disturbing.done():
            began = time.monotonic()
            ended.append(
                (await client.ask(next(numbers)))._replace(seconds=time.monotonic() - began)
            )
            if disturbing.done() and disturbing.exception():
                return

    await asyncio.gather(*map(go_on, itertools.islice(itertools.cycle(clients), CLIENTS)))
    await disturbing
    assert len(ended) == next(numbers) >= REQUESTS
    return ended


class Operator:
    """What is done to the fleet, step by step, each while requests are answered."""

    def __init__(self, session: aiohttp.ClientSession, service: Service, router: str) -> None:
        self._session, self._service, self._router = session, service, router
        self.killed: list[str] = []
        self.left: list[str] = []

    async def call(self, method: str, url: str, body: Any = None) -> tuple[int, Any]:
        key = bearer(self._service.keys.of_operator)
        async with self._session.request(method, url, json=body, headers=key) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def served(self, name: str) -> None:
        """Wait until this worker has answered `SERVED` requests as it is, and has one more."""
        url = f"{self._service.url(name)}/server_info"
        async with asyncio.timeout(START_S):
            while True:
                info = (await self.call("GET", url))[1]
                if info["rooms_ended"].get("success", 0) >= SERVED and info["rooms"]:
                    return
                await asyncio.sleep(0.02)

    async def kill(self, name: str) -> None:
        await self.served(name)
        await self._service.kill(name)
        self.killed.append(self._service.url(name))
        await self._service.start(name)
        print(f"  {name} killed and started again")

    async def restart(self, name: str) -> None:
        await self.served(name)
        print(f"  {name} restarted, drained in {await self._service.restart(name):.2f} s")

    async def join(self, role: str, **own: Any) -> str:
        name = self._service.add(role, **own)
        await self._service.start(name)
        if not own:  # it does not do so by itself
            url = self._service.url(name)
            assert (
                await self.call(
                    "POST", f"{self._router}/workers", {"url": url, "worker_type": role}
                )
            )[0] == 202
        await self.served(name)
        print(f"  {name} has joined and serves")
        return name

    async def leave(self, name: str) -> None:
        """It leaves, and has nothing when it has."""
        found = (await self.call("GET", f"{self._router}/workers"))[1]["workers"]
        (worker,) = [worker["id"] for worker in found if worker["url"] == self._service.url(name)]
        assert (await self.call("DELETE", f"{self._router}/workers/{worker}"))[0] == 202
        async with asyncio.timeout(START_S):
            while (await self.call("GET", f"{self._router}/workers/{worker}"))[0] != 404:
                await asyncio.sleep(0.01)
        self.left.append(name)
        print(f"  {name} has left, with {await at_rest(self._session, self._service.url(name))}")

    async def switch(self, name: str, role: str) -> None:
        await self.served(name)
        body = {"role": role, "drain_timeout_s": 60}
        status, answer = await self.call("POST", f"{self._service.url(name)}/switch_role", body)
        assert (status, answer.get("role")) == (200, role), answer
        print(f"  {name} is a {role} after {answer['seconds']:.2f} s")
        await self.served(name)


async def at_rest(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """What this worker's /metrics say of rooms and pages that are not free, once all of it is 0."""
    owners: dict[str, float] = {}
    try:
        async with asyncio.timeout(REST_S):
            while not owners or any(owners.values()):
                async with session.get(f"{url}/metrics") as answer:
                    text = await answer.text()
                samples = [
                    sample
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                ]
                rooms = sum(sample.value for sample in samples if sample.name == "kvflow_rooms")
                pages = [sample for sample in samples if sample.name == "kvflow_pages"]
                out = sum(sample.value for sample in pages if sample.labels["owner"] != "free")
                owners = {"rooms": rooms, "pages out": out}
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{url} has {owners} after {REST_S:g} s") from None
    return owners


def told(name: str, ended: list[Ended]) -> None:
    """Print how the requests ended."""
    seconds = sorted(one.seconds for one in ended)
    ways = dict(Counter(one.how for one in ended))
    print(
        f"{name}: {len(ended)} requests: {ways}; {seconds[len(seconds) // 2]:.2f} s median, "
        f"{seconds[-1]:.2f} s at most"
    )


def only_the_killed_lose(ended: list[Ended], killed: list[str]) -> None:
    """Nothing is wrong, and what is lost is a stream that a killed worker had begun."""
    assert not [one for one in ended if one.how == "wrong"]
    lost = [one for one in ended if one.how != "done"]
    assert all(one.how == "event peer_lost" and one.tokens for one in lost), lost
    assert all(any(url in one.message for url in killed) for one in lost), lost
    assert len(lost) <= CLIENTS * len(killed)


def session_with(key: str) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)


@pytest.mark.parametrize("plane", ["local", pytest.param("mooncake", marks=pytest.mark.soak)])
async def test_a_fleet_that_changes_under_load_answers_every_request_rightly(
    prompts: list[Prompt], plane: str
) -> None:
    if plane == "mooncake":
        pytest.importorskip("mooncake")
    moved = {"disaggregation_transfer_backend": plane, "transfer_rate_limit": RATE}
    async with (
        serving(2, keys=KEYS, prefix_cache="off", **moved) as service,
        session_with(KEYS.api) as session,
    ):
        router = await service.start_router()
        operator = Operator(session, service, router)

        async def disturb() -> None:
            await operator.kill("prefill-0")
            await operator.kill("decode-0")
            await operator.restart("prefill-1")
            await operator.restart("decode-1")
            joined = await operator.join("decode", join=router)
            await operator.leave("decode-1")
            await operator.switch("decode-0", "prefill")
            await operator.switch("prefill-1", "decode")
            await operator.switch("prefill-1", "prefill")
            await operator.switch("decode-0", "decode")
            await operator.restart(joined)
            assert (
                await operator.call("POST", f"{router}/workers", {"url": service.url("decode-1")})
            )[0] == 202
            await operator.served("decode-1")

        async with openai.AsyncOpenAI(
            base_url=f"{router}/v1", api_key=KEYS.api, max_retries=0
        ) as official:
            ours, theirs = Client(session, router, prompts), OpenAIClient(official, prompts)
            ended = await under_load([ours, theirs], disturb)
        told(f"kvflow router, {plane}", ended)
        only_the_killed_lose(ended, operator.killed)
        for name in service.workers:
            await at_rest(session, service.url(name))


SGLANG = (
    *("--disable-circuit-breaker", "--policy", "round_robin", "--retry-max-retries", "10"),
    *(
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--health-success-threshold",
        "1",
    ),
)


async def test_behind_sglang_router_workers_join_leave_and_come_back(prompts: list[Prompt]) -> None:
    """It says which workers it uses by the same routes, and knows nothing of roles that change."""
    async with serving(prefix_cache="off") as service, session_with("") as session:
        prefills = [
            (service.url(name), service.bootstrap_port(name)) for name in service.names("prefill")
        ]
        async with router_over(
            prefills, [*map(service.url, service.names("decode"))], *SGLANG
        ) as router:
            operator = Operator(session, service, router)

            async def disturb() -> None:
                await operator.kill("decode-0")
                await asyncio.sleep(3)  # it is not told who is back
                await operator.restart("prefill-0")
                await asyncio.sleep(3)
                await operator.join("decode", join=router)
                await operator.leave("decode-1")

            ended = await under_load([Client(session, router, prompts)], disturb)
        told("sglang_router", ended)
        assert not [one for one in ended if one.how == "wrong"]
        lost = [one for one in ended if one.how != "done"]
        assert len(lost) <= CLIENTS, lost  # those that decode-0 had when it was killed
        for name in service.workers:
            await at_rest(session, service.url(name))


async def test_a_role_that_cannot_start_leaves_the_old_one_and_a_busy_worker_keeps_its_own(
    prompts: list[Prompt],
) -> None:
    async with serving(1, keys=KEYS) as service, session_with(KEYS.api) as session:
        router = await service.start_router()
        operator, client = Operator(session, service, router), Client(session, router, prompts)
        switch = f"{service.url('decode-0')}/switch_role"
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", service.bootstrap_port("decode-0")))
            taken.listen()
            status, answer = await operator.call("POST", switch, {"role": "prefill"})
            print(answer["error"]["message"])
            assert status == 500
            assert (
                f"port {service.bootstrap_port('decode-0')} on 127.0.0.1 is in use"
                in answer["error"]["message"]
            )
            assert [(await client.ask(number)).how for number in range(4)] == ["done"] * 4
        body = {
            "input_ids": prompts[0].ids,
            "stream": True,
            "sampling_params": {"max_new_tokens": 256, "ignore_eos": True},
        }
        async with session.post(f"{router}/generate", json=body) as stream:
            await stream.content.readuntil(b"\n\n")
            status, answer = await operator.call("POST", switch, {"role": "prefill"})
            assert (status, answer["error"]["message"]) == (
                409,
                "this worker is not idle: 1 requests",
            )
            assert b"[DONE]" in await stream.read()
        assert (await operator.call("POST", switch, {"role": "prefill", "drain_timeout_s": 10}))[
            0
        ] == 200
        assert (await operator.call("POST", switch, {"role": "decode"}))[0] == 200
        assert (await client.ask(0)).how == "done"
        info = (await operator.call("GET", f"{service.url('decode-0')}/server_info"))[1]
        assert (info["started_as"], info["last_switch"]["ok"], info["rooms"]) == (
            "decode",
            True,
            {},
        )
        assert await service.workers["decode-0"].stop(START_S) == 0


async def test_a_router_that_is_restarted_while_a_worker_drains_does_not_get_it(
    prompts: list[Prompt],
) -> None:
    port = free_port()
    router = f"http://127.0.0.1:{port}"
    slow = {"join": router, "transfer_rate_limit": 1 << 17}
    async with serving(1, keys=KEYS, **slow) as service, session_with(KEYS.api) as session:
        operator = Operator(session, service, router)

        async def until_known(*roles: str) -> None:
            known: list[str] = []
            async with asyncio.timeout(START_S):
                while known != [*roles]:
                    await asyncio.sleep(0.01)
                    found = (await operator.call("GET", f"{router}/workers"))[1]["workers"]
                    known = sorted(
                        worker["worker_type"] for worker in found if worker["is_healthy"]
                    )

        await service.start_router(alone=True, port=port)
        await until_known("decode", "prefill")
        assert (await Client(session, router, prompts).ask(0)).how == "done"
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": service.bootstrap_port("prefill-0"),
        }
        body = {
            "input_ids": [i for prompt in prompts for i in prompt.ids],
            "bootstrap_room": 7,
            **meeting,
        }
        # Not by the router, which is to be stopped.
        legs = [
            session.post(f"{service.url(name)}/generate", json=body) for name in service.workers
        ]
        asking = [asyncio.ensure_future(leg) for leg in legs]
        info: dict[str, Any] = {"rooms": {}}
        async with asyncio.timeout(START_S):
            while "transferring" not in info["rooms"]:
                await asyncio.sleep(0.01)
                info = (await operator.call("GET", f"{service.url('prefill-0')}/server_info"))[1]
        stopping = asyncio.create_task(service.workers["decode-0"].stop(START_S))
        await until_known("prefill")
        assert service.router is not None and await service.router.stop(START_S) == 0
        await service.start_router(alone=True, port=port)
        await until_known("prefill")
        statuses = [(await leg).status for leg in asking]
        assert (statuses, await stopping) == ([200, 200], 0)
        await until_known("prefill")
        await service.start("decode-0")
        await until_known("decode", "prefill")
        assert (await Client(session, router, prompts).ask(1)).how == "done"
