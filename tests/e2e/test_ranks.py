"""`kvflow up` with a prefill of several ranks, as clients see it: the same tokens, one error, and a
stage that dies.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from tests.e2e.fleet import WITHIN_S, all_home, ask, rank_is_home, running
from tests.planes import nixl_unavailable_reason
from tests.serve.engine.pair import prompt_of
from tests.soak import sized

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets"), pytest.mark.timeout(600)]

Expected = Callable[[str, list[int], int], list[int]]
TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
BACK_S = 120.0  # for which a rank may import and load its part once more


class Answer(NamedTuple):
    status: int
    document: Any
    at_s: float

    @property
    def tokens(self) -> Any:
        return self.document.get("output_ids")

    @property
    def code(self) -> Any:
        return self.document.get("error", {}).get("code")


async def generate(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int = TOKENS
) -> Answer:
    return await post(
        session, url, {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": tokens}}
    )


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    async with session.post(f"{url}/generate", json=body) as answer:
        return Answer(answer.status, msgspec.json.decode(await answer.read()), time.monotonic())


async def some_served(session: aiohttp.ClientSession, url: str, count: int) -> Any:
    """What /server_info tells once so many rooms have succeeded."""
    async with asyncio.timeout(60):
        while (info := await ask(session, f"{url}/server_info"))["rooms_ended"].get(
            "success", 0
        ) < count:
            await asyncio.sleep(0.002)
    return info


class Clients:
    """Clients that each ask one new prompt after another, until one of them gets an error. So most
    of them usually have a request that prefill has not computed, however fast the machine is.

    A prompt does not end with a chunk of 16 tokens, so that almost every step continues one.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, count: int) -> None:
        self._stopping = False
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._ask(session, url)) for _ in range(count)]

    async def _ask(self, session: aiohttp.ClientSession, url: str) -> list[Answer]:
        answers = []
        while not self._stopping:
            answers.append(await generate(session, url, prompt_of(395, next(self._numbers))))
            self._stopping |= answers[-1].status != 200
        return answers

    async def all_answers(self) -> list[Answer]:
        """Every answer, once one is an error and each client has that of its last request."""
        async with asyncio.timeout(BACK_S):
            return list(itertools.chain.from_iterable(await asyncio.gather(*self._tasks)))


async def served_again(session: aiohttp.ClientSession, url: str) -> Answer:
    """The answer to a prompt of 100 tokens, once it is a good one."""
    async with asyncio.timeout(BACK_S):
        while (answer := await generate(session, url, prompt_of(100, 7))).status != 200:
            await asyncio.sleep(0.1)
    return answer


async def ranks_home(
    session: aiohttp.ClientSession, url: str, *, but: AbstractSet[int] = frozenset()
) -> list[Any]:
    """What each rank of a prefill has, once none of them (but for those of `but`) has anything of
    any request.
    """
    found: list[Any] = []
    try:
        async with asyncio.timeout(WITHIN_S):
            while True:
                found = (await ask(session, f"{url}/server_info"))["ranks"]
                mine = [rank for rank in found if rank["rank"] not in but]
                if all(rank_is_home(rank) for rank in mine):
                    return found
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(found) from None


async def gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The series of /metrics that name a rank."""
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {
        line.split()[0]: float(line.split()[1])
        for line in lines
        if 'rank="' in line and line[0] != "#"
    }


@pytest.mark.parametrize(
    ("family", "pp", "tp", "plane"),
    [
        pytest.param("llama", 4, 1, "local", marks=pytest.mark.soak),
        ("llama", 1, 2, "mooncake"),
        pytest.param("llama", 2, 2, "nixl", marks=pytest.mark.soak),
        pytest.param("deepseek_v3", 2, 1, "local", marks=pytest.mark.soak),
        pytest.param("deepseek_v3", 1, 2, "local", marks=pytest.mark.soak),
        ("deepseek_v3", 2, 2, "local"),
    ],
)
async def test_the_ranks_of_a_prefill_give_the_tokens_of_one(
    family: str, pp: int, tp: int, plane: str, tiny: Callable[[str], Path], expected: Expected
) -> None:
    """In chunks, several prompts at once, against stock transformers.

    Over planes that take blocks slices land in staging."""
    if plane == "mooncake":
        pytest.importorskip("mooncake.engine")
    if plane == "nixl" and (reason := nixl_unavailable_reason()):
        pytest.skip(reason)
    prompts = [prompt_of(n, n) for n in (1, 20, 77, 150, 33, 301, 64)]
    ranks = {
        "model_path": str(tiny(family)),
        "pp": pp,
        "tp": tp,
        "chunked_prefill_size": 32,
        "max_batch_tokens": 64,
    }
    async with (
        running(disaggregation_transfer_backend=plane, **ranks) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        alone = await generate(session, fleet.url, prompts[3])
        together = await asyncio.gather(
            *(generate(session, fleet.url, prompt) for prompt in prompts)
        )
        for prompt, answer in zip([prompts[3], *prompts], [alone, *together], strict=True):
            assert answer.tokens == expected(family, prompt, TOKENS), (len(prompt), answer)
        assert await all_home(session, prefill, decode)
        found = await ranks_home(session, prefill)
        assert len(found) == pp * tp
        assert [
            rank
            for rank in found
            if rank["internal_errors"]["handler"] or rank["internal_errors"]["step"]
        ] == []
        info = await ask(session, f"{prefill}/server_info")
        assert (info["pp_size"], info["tp_size"]) == (pp, tp)
        lines = await gauges(session, prefill)
        assert [lines[f'kvflow_rank_up{{rank="{rank}"}}'] for rank in range(pp * tp)] == [1.0] * (
            pp * tp
        )
        assert not any(
            value for name, value in lines.items() if "tickets" in name or "requests" in name
        )


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.soak)])
async def test_the_shards_of_a_decode_give_the_tokens_of_one(
    family: str, tiny: Callable[[str], Path], expected: Expected
) -> None:
    """In a pool that is short, so that requests are retracted, and with clients that leave."""
    prompts = [prompt_of(n, n) for n in (1, 20, 77, 150, 33, 301, 64)]
    short = {
        "chunked_prefill_size": 32,
        "max_batch_tokens": 64,
        "num_pages": 28,
        "new_token_ratio": 0.0,
    }
    async with (
        running(model_path=str(tiny(family)), decode_tp=2, **short) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        alone = await generate(session, fleet.url, prompts[3])
        assert alone.tokens == expected(family, prompts[3], TOKENS), alone
        together = await asyncio.gather(
            *(generate(session, fleet.url, prompt, 120) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, together, strict=True):
            assert answer.tokens == expected(family, prompt, 120), (len(prompt), answer)
        info = await ask(session, f"{decode}/server_info")
        assert info["retraction"]["retracts"] > 0 and info["tp_size"] == 2
        usual_s = max(answer.at_s for answer in together) - alone.at_s

        async def client(number: int) -> None:
            try:
                async with asyncio.timeout(usual_s * number / 16):
                    await generate(session, fleet.url, prompts[number % 7], 120)
            except TimeoutError:
                pass  # its connection is closed

        await asyncio.gather(*(client(number) for number in range(16)))
        assert await all_home(session, prefill, decode)
        asked = {
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "n": 2, "ignore_eos": True}
        }
        more = {"input_ids": prompts[2], "return_logprob": True, "return_hidden_states": "last"}
        async with session.post(f"{fleet.url}/generate", json={**asked, **more}) as response:
            assert response.status == 200, await response.text()
            both = msgspec.json.decode(await response.read())
        for answer in both:
            assert answer["output_ids"] == expected(family, prompts[2], 4)
            found = answer["meta_info"]
            assert (len(found["output_token_logprobs"]), len(found["hidden_states"])) == (4, 64)
        assert await all_home(session, prefill, decode)
        first, second = await ranks_home(session, decode)
        assert (first["rank"], second["rank"]) == (0, 1) and first["pid"] != second["pid"]
        lines = await gauges(session, decode)
        assert [lines[f'kvflow_rank_up{{rank="{rank}"}}'] for rank in range(2)] == [1.0, 1.0]
        assert first["internal_errors"] == {"handler": 0, "step": 0}


async def test_a_shard_of_a_decode_is_killed_in_mid_decode(tiny: Callable[[str], Path]) -> None:
    """Requests have their error at once, and the decode ends, so that whoever started it starts it
    again.
    """
    slow = {"decode_tp": 2, "retry_timeout_s": 0.0}
    async with (
        running(model_path=str(tiny("llama")), **slow) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0]
        asking = [
            asyncio.create_task(generate(session, fleet.url, prompt_of(100, i), 400))
            for i in range(8)
        ]
        async with asyncio.timeout(60):
            while (info := await ask(session, f"{decode.url}/server_info"))["ranks"][1][
                "requests"
            ] < 8:
                await asyncio.sleep(0.002)
        os.kill(info["ranks"][1]["pid"], signal.SIGKILL)
        killed_s = time.monotonic()
        answers = await asyncio.gather(*asking)
        assert {answer.code for answer in answers} == {"peer_lost"}, answers
        slowest_s = max(answer.at_s for answer in answers) - killed_s
        status = await decode.process.wait()
        print(
            f"8 requests failed, the last after {slowest_s:.3f} s; decode had ended "
            f"{time.monotonic() - killed_s:.2f} s"
        )
        assert slowest_s < WITHIN_S
        assert status == 1
        assert decode.last_lines[-1].startswith(
            "kvflow decode: error: shard 1 of the model is gone"
        ), decode.last_lines
        assert not Path(f"/proc/{info['ranks'][0]['pid']}").exists()
        assert await all_home(session, prefill)


@pytest.mark.parametrize(
    ("plane", "family", "pp", "tp"),
    [
        pytest.param("mooncake", "llama", 2, 2, marks=pytest.mark.soak),
        ("nixl", "qwen3_next", 1, 2),
    ],
    ids=["mooncake", "nixl"],
)
async def test_ranks_over_a_plane_between_machines(
    plane: str, family: str, pp: int, tp: int, tiny: Callable[[str], Path], expected: Expected
) -> None:
    """Through staging and with checksums, as on devices; legs that are posted by hand, and one of
    them wrong.
    """
    pytest.importorskip("mooncake.engine" if plane == "mooncake" else "nixl_cu12")
    moved = {
        "disaggregation_transfer_backend": plane,
        "verify_transfers": True,
        "staging": "always",
    }
    chunks = {"chunked_prefill_size": 32, "max_batch_tokens": 64}
    ranks = {"model_path": str(tiny(family)), "pp": pp, "tp": tp}
    async with running(**ranks, **chunks, **moved) as fleet, aiohttp.ClientSession() as session:
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        prompts = [prompt_of(n, n) for n in (1, 20, 77, 301)]
        together = await asyncio.gather(
            *(generate(session, fleet.url, prompt) for prompt in prompts)
        )
        for prompt, answer in zip(prompts, together, strict=True):
            assert answer.tokens == expected(family, prompt, TOKENS), (len(prompt), answer)
        rooms = itertools.count(1)

        async def legs(at_prefill: dict[str, Any], at_decode: dict[str, Any]) -> list[Answer]:
            where = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": fleet.prefills[0].bootstrap_port,
            }
            body = {
                "input_ids": prompts[2],
                "sampling_params": GREEDY,
                **where,
                "bootstrap_room": next(rooms),
            }
            urls = ((prefill, at_prefill), (decode, at_decode))
            return await asyncio.gather(
                *(post(session, url, {**body, **changes}) for url, changes in urls)
            )

        first, all_of_it = await legs({}, {})
        assert (first.status, all_of_it.tokens) == (200, expected(family, prompts[2], TOKENS))
        wrong: list[dict[str, Any]] = [
            {"input_ids": [1 << 20]},
            {"input_ids": prompts[1]},
            {"disagg_prefill_dp_rank": 1},
        ]
        for changes, is_decodes in itertools.product(wrong, (False, True)):
            answers = await (legs({}, changes) if is_decodes else legs(changes, {}))
            # A leg that is not told ends by a timer, and with another status.
            assert [answer.status for answer in answers] == [400, 400], (
                changes,
                is_decodes,
                answers,
            )
        first, refused = await legs({}, {"sampling_params": {**GREEDY, "temperature": 1.0}})
        assert (first.status, refused.status) == (200, 400) and "the first token" in str(
            refused.document
        )

        async def leaver(number: int) -> None:
            try:
                async with asyncio.timeout(0.02 * (number % 8)):
                    await generate(session, fleet.url, prompt_of(100 + number * 13 % 300, number))
            except TimeoutError:
                pass

        await asyncio.gather(*(leaver(number) for number in range(32)))
        answer = await generate(session, fleet.url, prompts[3])
        assert answer.tokens == expected(family, prompts[3], TOKENS)
        assert await all_home(session, prefill, decode)
        found = await ranks_home(session, prefill)
        assert [
            rank
            for rank in found
            if rank["internal_errors"]["handler"] or rank["internal_errors"]["step"]
        ] == []


@pytest.mark.parametrize(
    ("pp", "tp", "victim", "stage"),
    [pytest.param(4, 1, 2, {2}, marks=pytest.mark.soak), (2, 2, 3, {2, 3})],
    ids=["PP 4", "PP 2 TP 2"],
)
async def test_a_stage_is_killed_in_mid_prefill(
    pp: int, tp: int, victim: int, stage: set[int], tiny: Callable[[str], Path], expected: Expected
) -> None:
    """Each step is one chunk of one prompt, so that most of the prompts are not computed when it
    dies. The ranks of its `stage` are started again."""
    slow = {"chunked_prefill_size": 16, "max_batch_tokens": 16, "retry_timeout_s": 0.0}
    async with (
        running(model_path=str(tiny("llama")), pp=pp, tp=tp, **slow) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        clients = Clients(session, fleet.url, 12)
        info = await some_served(session, prefill, 2)
        pids = {rank["rank"]: rank["pid"] for rank in info["ranks"]}
        os.kill(pids[victim], signal.SIGKILL)
        killed_s = time.monotonic()
        answers = await clients.all_answers()
        lost = [answer for answer in answers if answer.status != 200]
        assert lost and {answer.code for answer in lost} == {"peer_lost"}, [
            a.document for a in lost
        ]
        slowest_s = max(answer.at_s for answer in lost) - killed_s
        told = f"{len(lost)} of {len(answers)} requests failed, the last after {slowest_s:.3f} s"
        print(f"PP {pp} TP {tp}, rank {victim} killed: {told}")
        assert slowest_s < WITHIN_S
        await ranks_home(session, prefill, but=stage)
        assert await all_home(session, decode)
        print(f"  pages of the others were free after {time.monotonic() - killed_s:.2f} s")
        answer = await served_again(session, fleet.url)
        print(f"  served again after {time.monotonic() - killed_s:.2f} s")
        assert answer.tokens == expected("llama", prompt_of(100, 7), TOKENS)
        now = {rank["rank"]: rank["pid"] for rank in await ranks_home(session, prefill)}
        assert {rank for rank in pids if pids[rank] != now[rank]} == stage, (
            "the others keep their models"
        )
        assert await all_home(session, prefill, decode)


async def test_a_storm_of_aborts_leaves_nothing_at_any_rank(
    tiny: Callable[[str], Path], expected: Expected
) -> None:
    """Clients leave at every moment of a request, and those that stay get their tokens."""
    slow = {"chunked_prefill_size": 16, "max_batch_tokens": 48}
    async with (
        running(model_path=str(tiny("llama")), pp=sized(2, 4), **slow) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        began_s = time.monotonic()
        await generate(session, fleet.url, prompt_of(300, 0))
        usual_s = time.monotonic() - began_s

        async def client(number: int) -> None:
            prompt = prompt_of(50 + number * 37 % 300, number)
            if number % 4 == 0:
                answer = await generate(session, fleet.url, prompt, 4)
                assert answer.tokens == expected("llama", prompt, 4), answer
                return
            try:
                async with asyncio.timeout(usual_s * (number % 16) / 8):
                    await generate(session, fleet.url, prompt, 4)
            except TimeoutError:
                pass  # its connection is closed

        for first in range(0, sized(64, 160), 16):
            await asyncio.gather(*(client(number) for number in range(first, first + 16)))
        assert await all_home(session, prefill, decode)
        found = await ranks_home(session, prefill)
        assert [
            rank
            for rank in found
            if rank["internal_errors"]["handler"] or rank["internal_errors"]["step"]
        ] == []
        lines = await gauges(session, prefill)
        assert not any(
            value for name, value in lines.items() if "tickets" in name or "requests" in name
        )
        answer = await generate(session, fleet.url, prompt_of(100, 7))
        assert answer.tokens == expected("llama", prompt_of(100, 7), TOKENS)


async def test_a_rank_that_is_frozen_fails_its_requests_and_may_go_on(
    tiny: Callable[[str], Path], expected: Expected
) -> None:
    slow = {"chunked_prefill_size": 16, "max_batch_tokens": 16, "retry_timeout_s": 0.0}
    async with (
        running(model_path=str(tiny("llama")), pp=2, **slow) as fleet,
        aiohttp.ClientSession() as session,
    ):
        prefill, decode = fleet.prefills[0].url, fleet.decodes[0].url
        clients = Clients(session, fleet.url, 8)
        info = await some_served(session, prefill, 2)
        pid = info["ranks"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            answers = await clients.all_answers()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert {answer.code for answer in answers if answer.status != 200} == {"peer_lost"}
        answer = await served_again(session, fleet.url)
        assert answer.tokens == expected("llama", prompt_of(100, 7), TOKENS)
        found = await ranks_home(session, prefill)
        assert found[1]["pid"] == pid
        assert await all_home(session, prefill, decode)
