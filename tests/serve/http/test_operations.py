"""The routes for routers and operators, the key, and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import msgspec
import pytest

from kvflow.http.authorization import Keys
from kvflow.node.report import SpaceReport
from kvflow.protocols.errors import Code, MisuseError
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.cache.storage.port import StorageState
from kvflow.serve.http.completion_service import RankReport
from kvflow.serve.launch.operator import declare_dead
from kvflow.testing.pair import until
from tests.fakes.servers import Client, events_of, samples_of, summed
from tests.fakes.service import (
    NO_CACHE,
    OPTIMISM,
    RETRACTION,
    FakeService,
    Meeting,
    Role,
    body,
)

Session = aiohttp.ClientSession


async def test_health_follows_the_service_and_the_drain(decode: Role) -> None:
    for path in ("/health", "/health_generate"):
        await decode.get(path)
    decode.service.unavailable_reason = "600 pages are in quarantine, more than 512: no new room"
    error = (await decode.get("/health", status=503))["error"]
    assert error["code"] == "degraded" and "600 pages" in error["message"]
    decode.service.unavailable_reason = ""
    decode.pipeline.draining = True
    await decode.get("/health", status=503)


async def test_a_process_that_cannot_serve_still_lives(meeting: Meeting) -> None:
    async with Role(FakeService("decode", meeting), keys=Keys("sesame")) as role:
        role.service.unavailable_reason = "the engine has stopped"
        role.pipeline.draining = True
        assert (await role.get("/livez")) == {"status": "ok"}
        await role.get("/health", status=503)


async def test_a_draining_server_looks_full(meeting: Meeting) -> None:
    async with Role(FakeService("decode", meeting), max_requests=7) as role:
        role.pipeline.draining = True
        [line] = await role.get("/get_load")
    assert line == {"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 7, "num_tokens": 64}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_server_does_not_finish_before_it_leaves_is_told_so(
    decode: Role, meeting: Meeting, stream: bool
) -> None:
    decode.service.gate.clear()
    asking = asyncio.create_task(decode.call("POST", "/generate", body(stream=stream)))
    await decode.begun()
    if stream:
        meeting.come(7)
        await until(lambda: decode.service.held)
    decode.pipeline.end_requests()
    answer = await asyncio.wait_for(asking, 20)
    if stream:
        first, last = events_of(answer.body)
        assert (answer.status, first["output_ids"]) == (200, [3])
    else:
        assert answer.status == 503
        last = answer.json
    assert last["error"]["code"] == "shutdown"
    await decode.over(7)


async def test_a_draining_server_refuses_and_tells_the_other_leg(prefill: Role) -> None:
    prefill.pipeline.draining = True
    answer = await prefill.call("POST", "/generate", body())
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    [(room, cause)] = prefill.service.refused
    assert (room, cause.code) == (7, Code.SHUTDOWN)


async def test_more_than_the_most_running_requests_are_refused(meeting: Meeting) -> None:
    async with Role(FakeService("decode", meeting), max_requests=1) as role:
        first = asyncio.create_task(role.post("/generate", body()))
        await role.begun()
        error = await role.refused(503, "/generate", body(bootstrap_room=8))
        assert error["code"] == "capacity"
        meeting.come(7)
        await asyncio.wait_for(first, 20)


async def test_completions_are_counted_and_not_bodies(meeting: Meeting) -> None:
    async with Role(FakeService("decode", meeting), max_requests=5) as role:

        def asked(rooms: list[int], prompts: str | list[str], n: int = 1) -> dict[str, Any]:
            return body(text=prompts, bootstrap_room=rooms, sampling_params={"n": n})

        many = asked([1, 2, 3, 4], ["w1", "w2"], 2)
        first = asyncio.create_task(role.post("/generate", many))
        await role.begun()
        assert (await role.get("/get_load"))[0]["num_reqs"] == 4
        error = await role.refused(503, "/generate", asked([5, 6], ["w1", "w2"]))
        assert error["code"] == "capacity"
        assert "completions that run or wait: asked for 6, limit 5" in error["message"]
        assert {room for room, _ in role.service.refused} == {5, 6}
        meeting.come(1, 2, 3, 4, 7, 8)
        await asyncio.wait_for(first, 20)
        assert (role.pipeline.running, role.pipeline.idle.is_set()) == (0, True)
        await role.post("/generate", asked([7, 8], ["w1", "w2"]))
        error = await role.refused(400, "/generate", asked(list(range(11, 17)), "w1", 6))
        assert error["code"] == "bad_request" and "asks for 6 completions" in error["message"]


async def test_a_request_that_takes_too_long_is_504(meeting: Meeting) -> None:
    async with Role(FakeService("decode", meeting), request_timeout_s=0.5) as role:
        await role.refused(504, "/generate", body())
        # The time may be over before the service gets the request.
        await role.over(*(request.room for request in role.service.requests))


# What the routers of SGLang read, and what is kvflow's own.
KEYS = """
model_path served_model_name tp_size dp_size load_balance_method disaggregation_mode

pp_size disaggregation_bootstrap_port disaggregation_transfer_backend page_size max_model_len
version role model dtype fingerprint sampling_defaults host control_endpoint data_plane
wire_version incarnation pool pages rows prefix_cache kv_events optimistic_prefill retraction
local_prompts staging_waits quarantine_pages quarantine_overdue_pages quarantine_limit_pages
pinned_pages pinned_limit_pages rooms rooms_ended ranks bytes_moved running waiting draining
started_as switching_to last_switch completions
"""


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(prefill: Role, path: str) -> None:
    info = await prefill.get(path)
    assert set(info) == set(KEYS.split()), (
        "whoever takes a key away takes it from an operator's script"
    )
    shape = {"page_size": 16, "num_pages": 4, "page_bytes": 1024, "components": 2}
    expected = {
        "disaggregation_mode": "prefill",
        "role": "prefill",
        "disaggregation_bootstrap_port": 8998,
        "incarnation": "0000000000000abc",
        "control_endpoint": "tcp://127.0.0.1:1",
        "data_plane": "fake",
        "pool": {**shape, "tokens": 64, "bytes": 4608, "dtype": "bfloat16", "device": "cpu"},
        "max_model_len": 65,  # less than the model's context, as the pool is smaller
        "pages": {"free": 3, "total": 4, "home": False, "room": 1},
        "rows": {"free": 6, "total": 8, "sequence": 2},
        "retraction": None,
        "optimistic_prefill": msgspec.to_builtins(OPTIMISM),
    }
    assert info | expected == info


async def test_what_has_a_limit_in_each_space_of_a_pool_is_counted_by_space(
    prefill: Role,
) -> None:
    spaces = (
        SpaceReport(
            name="pages",
            places=4,
            place_bytes=1024,
            quarantine=3,
            quarantine_overdue=2,
            quarantine_limit=2,
            pinned=1,
            pinned_limit=4,
        ),
        SpaceReport(
            name="rows",
            places=8,
            place_bytes=64,
            quarantine=1,
            quarantine_overdue=0,
            quarantine_limit=4,
            pinned=0,
            pinned_limit=8,
        ),
    )
    prefill.service.changed_report = {"spaces": spaces, "quarantine_pages": 4}
    info = await prefill.get("/server_info")
    assert info["spaces"] == list(msgspec.to_builtins(spaces))
    text = await prefill.metrics()
    samples = [*samples_of(text, "kvflow_quarantine_"), *samples_of(text, "kvflow_pinned_")]
    found = {(s.name.removeprefix("kvflow_"), *s.labels.values()): s.value for s in samples}
    assert found == {
        ("quarantine_pages",): 4,
        ("quarantine_overdue_pages", "pages"): 2,
        ("quarantine_overdue_pages", "rows"): 0,
        ("quarantine_limit_pages", "pages"): 2,
        ("quarantine_limit_pages", "rows"): 4,
        ("pinned_pages", "pages"): 1,
        ("pinned_pages", "rows"): 0,
        ("pinned_limit_pages", "pages"): 4,
        ("pinned_limit_pages", "rows"): 8,
    }


async def test_a_prefill_retracts_nothing_and_says_nothing_of_it(prefill: Role) -> None:
    text = await prefill.metrics()
    assert "kvflow_retracts_total" not in text and "kvflow_decode_steps_total" not in text
    assert "kvflow_host_memory_bytes" not in text
    assert "sglang:num_retracted_reqs{" in text, "dashboards expect it of every role"


async def test_a_prefill_says_what_it_began_early(prefill: Role) -> None:
    found = summed(await prefill.metrics())
    for name, want in (("starts_total", 8), ("hits_total", 4), ("lost_total", 2), ("requests", 1)):
        assert found[f"kvflow_optimistic_{name}"] == want


async def test_a_prefill_over_several_ranks_says_what_each_has(prefill: Role) -> None:
    there = RankReport(
        rank=0,
        up=True,
        pages_free=3,
        pages_total=8,
        pinned_pages=2,
        rooms={"transferring": 4},
        requests=5,
        tickets=6,
        bytes_moved=512,
        internal_errors={"step": 7},
        cache=cache_stats(host_pages=9, hit_tokens=64),
    )
    prefill.service.changed_report = {"pp_size": 2, "ranks": (there, RankReport(rank=1, up=False))}
    info = await prefill.get("/server_info")
    assert (info["pp_size"], info["tp_size"]) == (2, 1)
    assert info["ranks"][0] == msgspec.to_builtins(there)
    samples = samples_of(await prefill.metrics(), "kvflow_rank_")
    found = {
        (s.name.removeprefix("kvflow_rank_"), *sorted(s.labels.values())): s.value for s in samples
    }
    assert found == {
        ("up", "0"): 1,
        ("up", "1"): 0,
        ("pages_free", "0"): 3,
        ("pool_pages", "0"): 8,
        ("pinned_pages", "0"): 2,
        ("requests", "0"): 5,
        ("tickets", "0"): 6,
        ("transfer_bytes_total", "0"): 512,
        ("rooms", "0", "transferring"): 4,
        ("internal_errors_total", "0", "step"): 7,
        ("cache_pages", "0"): 4,
        ("cache_host_pages", "0"): 9,
        ("cache_hit_tokens_total", "0"): 64,
        ("cache_evicted_pages_total", "0"): 0,
        ("cache_failed_copies_total", "0"): 0,
    }


def cache_stats(**counts: Any) -> CacheStats:
    return msgspec.structs.replace(msgspec.structs.replace(NO_CACHE, pages=4), **counts)


async def sglang_samples(role: Role) -> dict[tuple[str, ...], float]:
    """By name, tp_rank and pp_rank."""
    return {
        (s.name.removeprefix("sglang:"), s.labels["tp_rank"], s.labels["pp_rank"]): s.value
        for s in samples_of(await role.metrics(), "sglang:")
        if "tp_rank" in s.labels and "le" not in s.labels
    }


async def test_dashboards_of_sglang_see_every_rank(prefill: Role) -> None:
    page = prefill.service.report().pool.page_size
    others = [
        RankReport(
            rank=rank,
            up=rank != 2,
            pages_free=3 * rank,
            pages_total=10 * rank,
            rooms={"bootstrapped": rank, "sent": 1},
            cache=cache_stats(evictable_pages=rank, asked_tokens=100, hit_tokens=10 * rank),
        )
        for rank in (1, 2, 3)
    ]
    ranks = (RankReport(rank=0, up=True, pages_total=999), *others)
    prefill.service.changed_report = {"pp_size": 2, "tp_size": 2, "ranks": ranks}
    found = await sglang_samples(prefill)
    report = prefill.service.report()
    assert {name[1:] for name in found} == {("0", "0"), ("1", "0"), ("1", "1")}
    for name, first, second, fourth in (
        ("max_total_num_tokens", report.pages_total * page, 10 * page, 30 * page),
        ("num_used_tokens", (report.pages_total - report.pages_free) * page, 6 * page, 18 * page),
        ("token_usage", 1 - report.pages_free / report.pages_total, 0.6, 0.6),
        ("cache_hit_rate", 0.0, 0.1, 0.3),
        ("num_prefill_bootstrap_queue_reqs", 0, 1, 3),
        ("num_prefill_inflight_queue_reqs", 1, 1, 1),
    ):
        values = [found[name, *rank] for rank in (("0", "0"), ("1", "0"), ("1", "1"))]
        assert values == [first, second, fourth], name
    assert ("num_running_reqs", "1", "0") not in found, (
        "which of its requests run, a rank does not tell"
    )
    prefill.service.changed_report = {}
    found = await sglang_samples(prefill)
    assert {name[1:] for name in found} == {("0", "0")}


async def test_shards_of_a_decode_have_no_rooms_of_their_own(decode: Role) -> None:
    ranks = tuple(RankReport(rank=rank, up=True, pages_free=1, pages_total=4) for rank in range(2))
    decode.service.changed_report = {"tp_size": 2, "ranks": ranks}
    found = await sglang_samples(decode)
    assert found["max_total_num_tokens", "1", "0"] == 4 * decode.service.report().pool.page_size
    assert found["num_decode_transfer_queue_reqs", "0", "0"] == 1
    assert ("num_decode_transfer_queue_reqs", "1", "0") not in found


async def test_hicache_s_names_are_there_where_a_tier_fills_them(prefill: Role) -> None:
    page = prefill.service.report().pool.page_size
    host = {"host_pages": 5, "host_limit_pages": 9, "loaded_pages": 3}
    state = StorageState(name="file", readable=True, writable=True)
    stored = {**host, "fetched_pages": 2, "stored_pages": 4, "storage": state}
    gauges = {"hicache_host_used_tokens": 5 * page, "hicache_host_total_tokens": 9 * page}
    evicted, loaded = {"evicted_tokens_total": 7 * page}, {"load_back_tokens_total": 3 * page}
    storage = {"prefetched_tokens_total": 2 * page, "backuped_tokens_total": 4 * page}
    for counts, expected in (
        (None, {}),
        ({}, evicted),
        (host, evicted | loaded | gauges),
        (stored, evicted | loaded | gauges | storage),
    ):
        cache = None if counts is None else cache_stats(evicted_pages=7, **counts)
        prefill.service.changed_report = {"cache": cache}
        found = await sglang_samples(prefill)
        names = {"evicted_tokens_total", "load_back_tokens_total", *gauges, *storage}
        assert {name: value for (name, *_), value in found.items() if name in names} == expected
    text = await prefill.metrics()
    (sample,) = samples_of(text, "sglang:backuped_tokens_total")
    labels = {"dp_rank": "0", "pp_rank": "0", "pp_size": "1", "tp_rank": "0"}
    assert sample.labels | labels | {"storage_backend": "file"} == sample.labels
    assert 'cache_type="PrefixCache"' in text


async def test_model_info_load_rooms_and_flush(decode: Role) -> None:
    info = await decode.get("/server_info")
    assert info["retraction"] == msgspec.to_builtins(RETRACTION)
    assert info["optimistic_prefill"] is None
    for path in ("/model_info", "/get_model_info"):
        assert (await decode.get(path))["model_path"] == "fake/model"
    for path in ("/get_load", "/get_loads"):
        [line] = await decode.get(path)
        assert line == {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 16}
    assert (await decode.call("POST", "/flush_cache")).status == 200
    await decode.get("/rooms/5", status=404)
    await decode.get("/rooms/five", status=400)
    for query in ("five", "-1", "", "1" * 10, "\u0661"):
        error = (await decode.get(f"/rooms?ended={query}", status=400))["error"]
        assert error["param"] == "ended" and "/rooms?ended=80" in error["message"]


async def test_completions_are_counted_in_server_info(decode: Role, met: None) -> None:
    before = (await decode.get("/server_info"))["completions"]
    assert (before["generated_tokens"], before["finished"]) == (0, 0)
    await decode.post("/generate", body())
    assert len((await decode.get("/rooms?ended=5"))["rooms"]) == 1
    found = (await decode.get("/server_info"))["completions"]
    assert (found["generated_tokens"], found["finished"], found["failed"]) == (3, 1, 0)
    latencies = found["latencies"]
    assert {name: sum(them["counts"]) for name, them in latencies.items()} == {
        "time_to_first_token_s": 1,
        "inter_token_s": 2,
        **({"transfer_s": 0} if "transfer_s" in latencies else {}),
    }
    for them in latencies.values():
        assert len(them["counts"]) == len(them["bounds"]) + 1


async def test_unknown_routes_and_methods_have_error_bodies(decode: Role) -> None:
    error = (await decode.get("/nope", status=404))["error"]
    assert error["type"] == "not_found_error"
    await decode.get("/generate", status=405)


async def test_metrics_are_valid_and_carry_both_vocabularies(decode: Role) -> None:
    await decode.get("/health")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for sample in samples_of(await decode.metrics())
    }
    ours: dict[tuple[str, ...], float] = {
        ("pages", "free"): 3,
        ("pages", "room"): 1,
        ("rooms", "transferring"): 1,
        ("rooms_ended_total", "failed:rendezvous"): 1,
        ("rooms_failed_total", "bootstrap", "rendezvous"): 1,
        ("transfer_bytes_total",): 2048,
        ("quarantine_pages",): 0,
        ("quarantine_limit_pages",): 0,
        ("peers", "silent"): 1,
        ("peers_declared_dead_total",): 2,
        ("rows", "free"): 6,
        ("rows", "sequence"): 2,
        ("pool_rows",): 8,
        ("decode_steps_total",): 77,
        ("retracts_total",): 9,
        ("resumes_total",): 5,
        ("recomputes_total",): 3,
        ("retracted_requests",): 1,
        ("host_memory_bytes",): 4096,
        ("host_memory_limit_bytes",): 8192,
        ("new_token_ratio",): 0.25,
        ("requests_total", "/health", "200"): 1,
    }
    sglangs = {
        "num_retracted_reqs": 1,
        "num_retracted_requests_total": 9,
        "new_token_ratio": 0.25,
        "mamba_usage": 0.25,
        "num_decode_transfer_queue_reqs": 1,
        "num_decode_prealloc_queue_reqs": 0,
        "num_bootstrap_failed_reqs_total": 1,
    }
    expected = {(f"kvflow_{name}", *labels): value for (name, *labels), value in ours.items()}
    for name, value in sglangs.items():
        expected[f"sglang:{name}", "0", "0", "0", "decode", "m"] = value
    assert found | expected == found


async def test_a_peer_is_declared_dead_by_who_has_the_key(decode: Role, meeting: Meeting) -> None:
    path = "/peers/000000000000abcd/declare_dead"
    error = await decode.refused(403, path)
    assert "--admin-api-key" in error["message"] and decode.service.dead == []
    async with Role(FakeService("decode", meeting), keys=Keys("open", "sesame")) as role:
        assert (await role.get("/peers"))["peers"][0]["phase"] == "silent"
        for key in ("", "open"):
            async with Client(role.port, key) as stranger:
                await stranger.refused(401, path)
        for wrong in ("/peers/dead/declare_dead", "/peers/nobody/declare_dead"):
            await role.refused(400, wrong)
        assert role.service.dead == []
        await role.post(path + "?why=it+burnt+down")
        [(incarnation, why)] = role.service.dead
        assert incarnation == 0xABCD and "127.0.0.1" in why and "it burnt down" in why


@pytest.mark.parametrize("key", ["sesame", "open"])
async def test_declaring_dead_from_the_command_line(
    meeting: Meeting, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Role(FakeService("decode", meeting), keys=Keys("open", "sesame")) as role:
        asking = asyncio.to_thread(
            declare_dead, role.url + "/", key, "000000000000abcd", "its machine is off"
        )
        if key == "sesame":
            await asking
            assert json.loads(capsys.readouterr().out)["declared_dead"] == "000000000000abcd"
            assert "its machine is off" in role.service.dead[0][1]
        else:
            with pytest.raises(MisuseError, match=r"401.*operator's key"):
                await asking


@pytest.mark.parametrize(
    "preface",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"\x00" * 64 + b"\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_http_leave_no_traceback(
    decode: Role, preface: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert b" 400 " in await decode.exchanged(preface)
    assert not [record for record in caplog.records if record.exc_info]
    await decode.get("/health")


async def test_what_nobody_foresaw_is_an_error_of_ours_and_the_server_goes_on(
    decode: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(decode.service, "report", fail)
        error = (await decode.get("/server_info", status=500))["error"]
        assert error["type"] == "internal_error" and "a bug" not in error["message"]
    await decode.get("/server_info")
