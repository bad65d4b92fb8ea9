"""What an operator sees of a running router, prefill and decode: their metrics, and their logs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvflow.serve.launch.child import Child
from tests.e2e.fleet import WITHIN_S, all_home, running
from tests.fakes.servers import labelled, summed
from tests.serve.http.test_measures import QUEUES, TRANSFER_NAMES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fleets")]

# The router closes prefill's leg when decode's answer is complete, and prefill counts a leg that it
# has not answered by then as left. With this many tokens, prefill answers first.
TOKENS = 30
BODY = {
    "text": "The assert statement",
    "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
}
OTHER_NAMES = (  # panels of SGLang's dashboard
    *("num_running_reqs", "num_queue_reqs", "gen_throughput", "cache_hit_rate", "token_usage"),
    *(
        "e2e_request_latency_seconds_count",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
    ),
    *("num_retracted_reqs", "num_retracted_requests_total", "new_token_ratio"),
    *(
        "queue_time_seconds_count",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_requests_total",
    ),
)


async def scrape(session: aiohttp.ClientSession, child: Child) -> str:
    async with session.get(f"{child.url}/metrics") as answer:
        assert answer.status == 200
        return await answer.text()


async def generate(session: aiohttp.ClientSession, url: str, **changes: Any) -> int:
    async with session.post(f"{url}/generate", json={**BODY, **changes}) as answer:
        await answer.read()
        return answer.status


async def test_every_name_is_there_and_moves_with_requests() -> None:
    async with (
        running(sglang_metrics=True, rendezvous_s=2.0) as fleet,
        aiohttp.ClientSession() as session,
    ):
        assert fleet.router is not None
        prefill, decode, router = fleet.prefills[0], fleet.decodes[0], fleet.router
        for number in range(6):
            assert await generate(session, fleet.url, stream=number < 2) == 200
        # refused by both workers, before there is a room
        assert await generate(session, fleet.url, sampling_params={"temperature": -1}) == 400
        # a client that leaves in mid-stream
        many = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
        async with session.post(
            f"{fleet.url}/generate", json={**BODY, "sampling_params": many, "stream": True}
        ) as answer:
            await answer.content.readuntil(b"\n\n")
            # Decode may stream before prefill has answered, and the router would end that leg too.
            async with asyncio.timeout(WITHIN_S):
                while summed(await scrape(session, prefill))["sglang:num_requests_total"] < 7:
                    await asyncio.sleep(0.02)
        # and a room at which no prefill's half ever arrives
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": 5,
        }
        assert await generate(session, decode.url, **meeting) == 504
        assert await all_home(session, prefill.url, decode.url)
        texts = {child.role: await scrape(session, child) for child in (prefill, decode, router)}
        for role in ("prefill", "decode"):
            found = summed(texts[role])
            for name in TRANSFER_NAMES:
                assert f"sglang:kv_transfer_{name}_sum" in found
            for name in (*(f"num_{queue}_queue_reqs" for queue in QUEUES), *OTHER_NAMES):
                assert f"sglang:{name}" in found
            assert (
                found["sglang:num_requests_total"]
                == found["sglang:e2e_request_latency_seconds_count"]
            )
            assert (
                found["sglang:num_bootstrap_failed_reqs_total"] == 1
                and found["sglang:num_transfer_failed_reqs_total"] == 0
            )
            refused = labelled(texts[role], "kvflow_requests_refused_total")
            assert refused == {("bad_request",): 1}
            assert found["kvflow_queue_seconds_count"] >= 7
        sent, received = summed(texts["prefill"]), summed(texts["decode"])
        assert (
            received["sglang:num_requests_total"] == 6
            and received["sglang:num_aborted_requests_total"] == 1
        )
        assert received["sglang:generation_tokens_total"] >= 6 * TOKENS + 1
        assert received["sglang:generation_tokens_histogram_sum"] == 6 * TOKENS
        assert received["kvflow_rooms_failed_total"] == 1
        # prefill has done its part of what the client left.
        assert sent["sglang:num_requests_total"] == 7
        assert [sent[f"sglang:kv_transfer_{name}_count"] for name in TRANSFER_NAMES] == [
            7,
            7,
            7,
            7,
            7,
        ]
        assert sent["sglang:kv_transfer_total_mb_sum"] * (1 << 20) == sent["kvflow_room_bytes_sum"]
        assert (
            received["sglang:kv_transfer_bootstrap_ms_count"]
            == received["sglang:kv_transfer_alloc_ms_count"]
            == 8
        )


async def lines_of(child: Child, word: str, count: int) -> list[dict[str, Any]]:
    """That many JSON lines of a role that are about the request `word`; every line must be JSON."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(WITHIN_S):
        while len(found) < count:
            await asyncio.sleep(0.02)
            found = [d for d in map(json.loads, child.last_lines) if d.get("request_id") == word]
    return found


async def test_an_id_given_by_a_client_is_in_the_logs_of_all_three() -> None:
    async with (
        running(log_format="json", log_level="debug", poll_s=60.0) as fleet,
        aiohttp.ClientSession() as session,
    ):
        assert fleet.router is not None
        headers = {"X-Request-ID": "find-me"}
        async with session.post(f"{fleet.url}/generate", json=BODY, headers=headers) as answer:
            assert (answer.status, answer.headers["X-Request-ID"]) == (200, "find-me")
            room = int(answer.headers["X-Kvflow-Room"])
        access: dict[str, Any] = {}
        for child in (fleet.router, *fleet.prefills, *fleet.decodes):
            lines = await lines_of(child, "find-me", 1 if child is fleet.router else 4)
            assert {tuple(line["rooms"]) for line in lines} == {(room,)} and {
                line["role"] for line in lines
            } == {child.role}
            (access,) = [line for line in lines if line["logger"] == "kvflow.access"]
            assert (access["status"], access["method"], access["path"]) == (
                200,
                "POST",
                "/generate",
            )
            told = [line["message"] for line in lines if line["logger"] == "kvflow.rooms"]
            assert child is fleet.router or (told and any("success" in line for line in told))
        assert access["completion_tokens"] == TOKENS and access["prompt_tokens"] > 0
        decode = fleet.decodes[0].url
        async with session.get(f"{decode}/rooms/{room}") as answer:
            assert (await answer.json())["request_id"] == "find-me"
        assert await all_home(session, decode)
