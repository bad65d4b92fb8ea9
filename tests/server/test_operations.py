"""The routes for routers and operators, the key, and bytes that are no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvflow.http.authorization import Keys
from kvflow.protocols.errors import Code, MisuseError
from kvflow.serve.cache.prefix import CacheStats
from kvflow.serve.cache.storage.port import StorageState
from kvflow.serve.http.completion_service import RankReport
from kvflow.serve.launch.operator import declare_dead
from tests.server.fake_service import (
    OPTIMISM,
    RETRACTION,
    FakeService,
    Meeting,
    Role,
    Server,
    served,
)

Session = aiohttp.ClientSession


async def get(session: Session, server: Server, path: str) -> tuple[int, Any]:
    async with session.get(server.make_url(path)) as answer:
        return answer.status, json.loads(await answer.read())


async def test_health_follows_the_engine_and_the_drain(
    decode: Role, decode_server: Server, session: Session
) -> None:
    for path in ("/health", "/health_generate"):
        assert (await get(session, decode_server, path))[0] == 200
    decode.service.unavailable_reason = "the engine has stopped"
    assert (await get(session, decode_server, "/health"))[0] == 503
    decode.service.unavailable_reason = ""
    decode.pipeline.draining = True
    assert (await get(session, decode_server, "/health"))[0] == 503


async def test_a_process_that_cannot_serve_still_lives(meeting: Meeting, session: Session) -> None:
    role = Role(FakeService("decode", meeting), keys=Keys("sesame"))
    role.service.unavailable_reason = "the engine has stopped"
    role.pipeline.draining = True
    async with served(role.app) as server:
        assert (await get(session, server, "/livez")) == (200, {"status": "ok"})
        assert (await get(session, server, "/health"))[0] == 503


async def test_a_draining_server_looks_full(meeting: Meeting, session: Session) -> None:
    role = Role(FakeService("decode", meeting), max_requests=7)
    async with served(role.app) as server:
        role.pipeline.draining = True
        [line] = (await get(session, server, "/get_load"))[1]
    assert line == {"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 7, "num_tokens": 64}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_server_does_not_finish_before_it_leaves_is_told_so(
    decode: Role, decode_server: Server, meeting: Meeting, session: Session, stream: bool
) -> None:
    decode.service.gate.clear()
    body = {"text": "w1", "bootstrap_room": 1, "bootstrap_host": "h", "stream": stream}
    asking = asyncio.create_task(session.post(decode_server.make_url("/generate"), json=body))
    await asyncio.wait_for(decode.service.started.wait(), 5)
    if stream:
        meeting.of(1).set_result(None)
        answer = await asyncio.wait_for(asking, 5)
        assert b'"output_ids":[2]' in await answer.content.readuntil(b"\n\n")
        decode.pipeline.end_requests()
        last = json.loads((await answer.read()).removeprefix(b"data: "))
    else:
        decode.pipeline.end_requests()
        answer = await asyncio.wait_for(asking, 5)
        assert answer.status == 503
        last = json.loads(await answer.read())
    assert last["error"]["code"] == "shutdown"
    await asyncio.wait_for(decode.pipeline.idle.wait(), 5)


async def test_a_draining_server_refuses_and_tells_the_other_leg(
    prefill: Role, prefill_server: Server, session: Session
) -> None:
    prefill.pipeline.draining = True
    body = {"text": "w1", "bootstrap_room": 3, "bootstrap_host": "h"}
    async with session.post(prefill_server.make_url("/generate"), json=body) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
    [(room, cause)] = prefill.service.refused
    assert (room, cause.code) == (3, Code.SHUTDOWN)


async def test_more_than_the_most_running_requests_are_refused(
    meeting: Meeting, session: Session
) -> None:
    role = Role(FakeService("decode", meeting), max_requests=1)
    async with served(role.app) as server:
        url = server.make_url("/generate")
        first = asyncio.create_task(
            session.post(url, json={"text": "w1", "bootstrap_room": 1, "bootstrap_host": "h"})
        )
        await asyncio.wait_for(role.service.started.wait(), 5)
        async with session.post(
            url, json={"text": "w1", "bootstrap_room": 2, "bootstrap_host": "h"}
        ) as second:
            assert second.status == 503
            assert json.loads(await second.read())["error"]["code"] == "capacity"
        meeting.of(1).set_result(None)
        assert (await asyncio.wait_for(first, 5)).status == 200


async def test_completions_are_counted_and_not_bodies(meeting: Meeting, session: Session) -> None:
    role = Role(FakeService("decode", meeting), max_requests=5)
    host = {"bootstrap_host": "h"}

    async def post(
        server: Server, rooms: list[int], prompts: str | list[str], n: int = 1
    ) -> tuple[int, Any]:
        body = {"text": prompts, "bootstrap_room": rooms, "sampling_params": {"n": n}, **host}
        async with session.post(server.make_url("/generate"), json=body) as answer:
            return answer.status, json.loads(await answer.read())

    async with served(role.app) as server:
        first = asyncio.create_task(post(server, [1, 2, 3, 4], ["w1", "w2"], 2))
        await asyncio.wait_for(role.service.started.wait(), 5)
        assert (await get(session, server, "/get_load"))[1][0]["num_reqs"] == 4
        status, answer = await post(server, [5, 6], ["w1", "w2"])
        assert (status, answer["error"]["code"]) == (503, "capacity")
        assert "completions that run or wait: asked for 6, limit 5" in answer["error"]["message"]
        assert {room for room, _ in role.service.refused} == {5, 6}
        for room in (1, 2, 3, 4, 7, 8):
            meeting.of(room).set_result(None)
        assert (await asyncio.wait_for(first, 5))[0] == 200
        assert (role.pipeline.running, role.pipeline.idle.is_set()) == (0, True)
        assert (await post(server, [7, 8], ["w1", "w2"]))[0] == 200
        status, answer = await post(server, list(range(11, 17)), "w1", 6)
        assert (status, answer["error"]["code"]) == (400, "bad_request")
        assert "asks for 6 completions" in answer["error"]["message"]


async def test_a_request_that_takes_too_long_is_504(meeting: Meeting, session: Session) -> None:
    role = Role(FakeService("decode", meeting), request_timeout_s=0.5)
    async with served(role.app) as server:
        body = {"text": "w1", "bootstrap_room": 1, "bootstrap_host": "h"}
        async with session.post(server.make_url("/generate"), json=body) as answer:
            assert answer.status == 504
    assert await asyncio.wait_for(role.service.ended.get(), 5) == 1


OWN_KEYS = {
    *(
        "pp_size",
        "disaggregation_bootstrap_port",
        "disaggregation_transfer_backend",
        "page_size",
        "max_model_len",
    ),
    *("version", "role", "model", "dtype", "fingerprint"),
    *("sampling_defaults", "host", "control_endpoint", "data_plane", "wire_version"),
    *("incarnation", "pool", "pages", "rows", "prefix_cache"),
    *("kv_events", "optimistic_prefill", "retraction", "staging_waits", "quarantine_pages"),
    *(
        "quarantine_overdue_pages",
        "quarantine_limit_pages",
        "pinned_pages",
        "pinned_limit_pages",
        "rooms",
        "rooms_ended",
    ),
    *("ranks", "bytes_moved", "running", "waiting", "draining"),
    *("started_as", "switching_to", "last_switch"),
}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info(prefill_server: Server, session: Session, path: str) -> None:
    status, info = await get(session, prefill_server, path)
    assert status == 200
    routers = {
        "model_path",
        "served_model_name",
        "tp_size",
        "dp_size",
        "load_balance_method",
        "disaggregation_mode",
    }
    assert routers <= set(info)
    assert set(info) == routers | OWN_KEYS, (
        "whoever takes a key away takes it from an operator's script"
    )
    assert info["disaggregation_mode"] == info["role"] == "prefill"
    assert info["disaggregation_bootstrap_port"] == 8998
    assert info["incarnation"] == "0000000000000abc"
    assert info["control_endpoint"] == "tcp://127.0.0.1:1"
    assert info["data_plane"] == "fake"
    shape = {"page_size": 16, "num_pages": 4, "page_bytes": 1024, "components": 2}
    assert info["pool"] == {
        **shape,
        "tokens": 64,
        "bytes": 4608,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    assert info["max_model_len"] == 65, "less than the model's context, as the pool is smaller"
    assert info["pages"] == {"free": 3, "total": 4, "home": False, "room": 1}
    assert info["rows"] == {"free": 6, "total": 8, "sequence": 2}
    assert info["retraction"] is None


async def test_a_prefill_retracts_nothing_and_says_nothing_of_it(
    prefill_server: Server, session: Session
) -> None:
    async with session.get(prefill_server.make_url("/metrics")) as answer:
        text = await answer.text()
    assert "kvflow_retracts_total" not in text and "kvflow_decode_steps_total" not in text
    assert "kvflow_host_memory_bytes" not in text
    assert "sglang:num_retracted_reqs{" in text, "dashboards expect it of every role"


async def test_a_prefill_says_what_it_began_early(prefill_server: Server, session: Session) -> None:
    _, info = await get(session, prefill_server, "/server_info")
    assert info["optimistic_prefill"] == msgspec.to_builtins(OPTIMISM)
    async with session.get(prefill_server.make_url("/metrics")) as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    found = {sample.name: sample.value for family in families for sample in family.samples}
    for name, want in (("starts_total", 8), ("hits_total", 4), ("lost_total", 2), ("requests", 1)):
        assert found[f"kvflow_optimistic_{name}"] == want


async def test_a_prefill_over_several_ranks_says_what_each_has(
    prefill: Role, prefill_server: Server, session: Session
) -> None:
    """Of one that is not there, no more than that."""
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
    _, info = await get(session, prefill_server, "/server_info")
    assert (info["pp_size"], info["tp_size"], info["ranks"][0]) == (
        2,
        1,
        msgspec.to_builtins(there),
    )
    async with session.get(prefill_server.make_url("/metrics")) as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.name.startswith("kvflow_rank_")
    ]
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
    base = {
        "pages": 4,
        "evictable_pages": 0,
        "asked_tokens": 0,
        "hit_tokens": 0,
        "evicted_pages": 0,
    }
    return CacheStats(**base | counts)


async def sglang_samples(session: Session, server: Server) -> dict[tuple[str, ...], float]:
    """By name, tp_rank and pp_rank."""
    async with session.get(server.make_url("/metrics")) as answer:
        families = list(text_string_to_metric_families(await answer.text()))
    samples = [
        sample
        for family in families
        for sample in family.samples
        if sample.name.startswith("sglang:")
    ]
    return {
        (s.name.removeprefix("sglang:"), s.labels["tp_rank"], s.labels["pp_rank"]): s.value
        for s in samples
        if "tp_rank" in s.labels and "le" not in s.labels
    }


async def test_dashboards_of_sglang_see_every_rank(
    prefill: Role, prefill_server: Server, session: Session
) -> None:
    """The first one by the worker itself, the others by what they tell it; of one that is not there
    nothing.
    """
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
    changes = {
        "pp_size": 2,
        "tp_size": 2,
        "ranks": (RankReport(rank=0, up=True, pages_total=999), *others),
    }
    prefill.service.changed_report = changes
    found = await sglang_samples(session, prefill_server)
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
        assert [found[name, *rank] for rank in (("0", "0"), ("1", "0"), ("1", "1"))] == [
            first,
            second,
            fourth,
        ], name
    assert ("num_running_reqs", "1", "0") not in found, (
        "which of its requests run, a rank does not tell"
    )
    prefill.service.changed_report = {}
    found = await sglang_samples(session, prefill_server)
    assert {name[1:] for name in found} == {("0", "0")}


async def test_shards_of_a_decode_have_no_rooms_of_their_own(
    decode: Role, decode_server: Server, session: Session
) -> None:
    ranks = tuple(RankReport(rank=rank, up=True, pages_free=1, pages_total=4) for rank in range(2))
    decode.service.changed_report = {"tp_size": 2, "ranks": ranks}
    found = await sglang_samples(session, decode_server)
    assert found["max_total_num_tokens", "1", "0"] == 4 * decode.service.report().pool.page_size
    assert found["num_decode_transfer_queue_reqs", "0", "0"] == 1
    assert ("num_decode_transfer_queue_reqs", "1", "0") not in found


async def test_hicache_s_names_are_there_where_a_tier_fills_them(
    prefill: Role, prefill_server: Server, session: Session
) -> None:
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
        found = await sglang_samples(session, prefill_server)
        names = {"evicted_tokens_total", "load_back_tokens_total", *gauges, *storage}
        assert {name: value for (name, *_), value in found.items() if name in names} == expected
    async with session.get(prefill_server.make_url("/metrics")) as answer:
        text = await answer.text()
    labels = 'dp_rank="0",pp_rank="0",pp_size="1",storage_backend="file",tp_rank="0"'
    (line,) = (
        line for line in text.splitlines() if line.startswith("sglang:backuped_tokens_total{")
    )
    assert all(part in line for part in labels.split(","))
    assert 'cache_type="PrefixCache"' in text


async def test_a_decode_says_what_it_retracted(decode_server: Server, session: Session) -> None:
    _, info = await get(session, decode_server, "/server_info")
    assert info["retraction"] == msgspec.to_builtins(RETRACTION)
    assert info["optimistic_prefill"] is None


async def test_model_info_load_rooms_and_flush(
    decode: Role, decode_server: Server, session: Session
) -> None:
    for path in ("/model_info", "/get_model_info"):
        assert (await get(session, decode_server, path))[1]["model_path"] == "fake/model"
    for path in ("/get_load", "/get_loads"):
        [line] = (await get(session, decode_server, path))[1]
        assert line == {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 2, "num_tokens": 16}
    async with session.post(decode_server.make_url("/flush_cache")) as answer:
        assert answer.status == 200
    assert (await get(session, decode_server, "/rooms/5"))[0] == 404
    assert (await get(session, decode_server, "/rooms/five"))[0] == 400


async def test_unknown_routes_and_methods_have_error_bodies(
    decode_server: Server, session: Session
) -> None:
    status, body = await get(session, decode_server, "/nope")
    assert status == 404
    assert body["error"]["type"] == "not_found_error"
    assert (await get(session, decode_server, "/generate"))[0] == 405


async def test_metrics_are_valid_and_carry_both_vocabularies(
    decode_server: Server, session: Session
) -> None:
    await get(session, decode_server, "/health")
    async with session.get(decode_server.make_url("/metrics")) as answer:
        text = (await answer.read()).decode()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples[("kvflow_pages", "free")] == 3
    assert samples[("kvflow_rooms_failed_total", "bootstrap", "rendezvous")] == 1
    assert samples[("kvflow_pages", "room")] == 1
    assert samples[("kvflow_transfer_bytes_total",)] == 2048
    assert samples[("kvflow_quarantine_pages",)] == samples[("kvflow_quarantine_limit_pages",)] == 0
    assert samples[("kvflow_peers", "silent")] == 1
    assert samples[("kvflow_peers_declared_dead_total",)] == 2
    assert samples[("kvflow_rooms", "transferring")] == 1
    assert samples[("kvflow_rows", "free")] == 6
    assert samples[("kvflow_rows", "sequence")] == 2
    assert samples[("kvflow_pool_rows",)] == 8
    assert samples[("kvflow_decode_steps_total",)] == 77
    for name, want in (
        *(
            ("retracts_total", 9),
            ("resumes_total", 5),
            ("recomputes_total", 3),
            ("retracted_requests", 1),
        ),
        *(
            ("host_memory_bytes", 4096),
            ("host_memory_limit_bytes", 8192),
            ("new_token_ratio", 0.25),
        ),
    ):
        assert samples[(f"kvflow_{name}",)] == want
    for name, want in (
        *(
            ("num_retracted_reqs", 1),
            ("num_retracted_requests_total", 9),
            ("new_token_ratio", 0.25),
        ),
        ("mamba_usage", 0.25),
    ):
        assert samples[(f"sglang:{name}", "0", "0", "0", "decode", "m")] == want
    assert samples[("kvflow_rooms_ended_total", "failed:rendezvous")] == 1
    assert samples[("kvflow_requests_total", "/health", "200")] == 1
    assert samples[("sglang:num_decode_transfer_queue_reqs", "0", "0", "0", "decode", "m")] == 1
    assert samples[("sglang:num_decode_prealloc_queue_reqs", "0", "0", "0", "decode", "m")] == 0
    assert samples[("sglang:num_bootstrap_failed_reqs_total", "0", "0", "0", "decode", "m")] == 1


async def test_quarantine_above_its_limit_is_a_degraded_server(
    decode: Role, decode_server: Server, session: Session
) -> None:
    decode.service.unavailable_reason = "600 pages are in quarantine, more than 512: no new room"
    status, body = await get(session, decode_server, "/health")
    assert (status, body["error"]["code"]) == (503, "degraded")
    assert "600 pages" in body["error"]["message"]


async def test_a_peer_is_declared_dead_by_who_has_the_key(
    meeting: Meeting, session: Session
) -> None:
    role = Role(FakeService("decode", meeting), keys=Keys("open", "sesame"))
    key = {"Authorization": "Bearer sesame"}
    async with served(role.app) as server:
        path = "/peers/000000000000abcd/declare_dead"
        async with session.get(server.make_url("/peers"), headers=key) as answer:
            assert json.loads(await answer.read())["peers"][0]["phase"] == "silent"
        for headers in ({}, {"Authorization": "Bearer open"}):
            async with session.post(server.make_url(path), headers=headers) as answer:
                assert answer.status == 401
        for wrong in ("/peers/dead/declare_dead", "/peers/nobody/declare_dead"):
            async with session.post(server.make_url(wrong), headers=key) as answer:
                assert answer.status == 400
        assert role.service.dead == []
        async with session.post(
            server.make_url(path + "?why=it+burnt+down"), headers=key
        ) as answer:
            assert answer.status == 200
        [(incarnation, why)] = role.service.dead
        assert incarnation == 0xABCD and "127.0.0.1" in why and "it burnt down" in why


async def test_without_a_key_nobody_is_declared_dead(
    decode: Role, decode_server: Server, session: Session
) -> None:
    async with session.post(
        decode_server.make_url("/peers/000000000000abcd/declare_dead")
    ) as answer:
        assert answer.status == 403
        assert "--admin-api-key" in json.loads(await answer.read())["error"]["message"]
    assert decode.service.dead == []


@pytest.mark.parametrize("key", ["sesame", "open"])
async def test_declaring_dead_from_the_command_line(
    meeting: Meeting, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    role = Role(FakeService("decode", meeting), keys=Keys("open", "sesame"))
    async with served(role.app) as server:
        asking = asyncio.to_thread(
            declare_dead, server.url + "/", key, "000000000000abcd", "its machine is off"
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
    decode_server: Server, session: Session, preface: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reader, writer = await asyncio.open_connection("127.0.0.1", decode_server.port)
    writer.write(preface)
    assert b" 400 " in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    assert not [record for record in caplog.records if record.exc_info]
    assert (await get(session, decode_server, "/health"))[0] == 200


async def test_what_nobody_foresaw_is_an_error_of_ours_and_the_server_goes_on(
    decode: Role, decode_server: Server, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(decode.service, "report", fail)
        status, answer = await get(session, decode_server, "/server_info")
        assert (status, answer["error"]["type"]) == (500, "internal_error")
        assert "a bug" not in answer["error"]["message"]
    assert (await get(session, decode_server, "/server_info"))[0] == 200
