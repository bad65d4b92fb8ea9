"""Every metric moves with the requests made, by exactly as much."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.ports import RoomEnding
from kvflow.serve.http.completion_service import Report
from kvflow.serve.http.measures import (
    THROUGHPUT_WINDOW_S,
    CompletionMeasures,
    RequestMeter,
    Throughput,
)
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.telemetry.counters import Counts, failed_in
from kvflow.telemetry.histogram import Histogram
from kvflow.testing.pair import Pair, until
from tests.fakes.servers import labelled, samples_of, summed
from tests.fakes.service import FakeService, Meeting, Role, body
from tests.handlers.scenes import PROMPT

pytest_plugins = ["kvflow.testing.fixtures"]

TRANSFER_NAMES = ("latency_ms", "speed_gb_s", "bootstrap_ms", "alloc_ms", "total_mb")
QUEUES = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer")


async def outcomes(decode: Role) -> dict[tuple[str, ...], float]:
    found = labelled(await decode.metrics(), "kvflow_completions_total")
    ends = ("finished", "failed", "aborted")
    assert set(found) == {(end, stream) for end in ends for stream in ("true", "false")}
    return {labels: count for labels, count in found.items() if count}


async def test_counts_equal_what_was_asked(meeting: Meeting, decode: Role) -> None:
    meeting.come(*range(5))
    for room in range(5):
        await decode.call("POST", "/generate", body(bootstrap_room=room, stream=room < 2))
    assert await outcomes(decode) == {("finished", "true"): 2, ("finished", "false"): 3}
    text = await decode.metrics()
    assert labelled(text, "sglang:num_requests_total") == {
        ("decode", "true", "m"): 2,
        ("decode", "false", "m"): 3,
    }
    found = summed(text)
    expected = {
        "kvflow_completion_seconds_count": 5,
        "kvflow_time_to_first_token_seconds_count": 5,
        "kvflow_inter_token_seconds_count": 10,
        "kvflow_generated_tokens_total": 15,
        "kvflow_completion_prompt_tokens_sum": 10,
        "kvflow_completion_generated_tokens_sum": 15,
        "sglang:e2e_request_latency_seconds_count": 5,
        "sglang:time_to_first_token_seconds_count": 5,
        "sglang:inter_token_latency_seconds_count": 10,
        "sglang:prompt_tokens_total": 10,
        "sglang:prompt_tokens_histogram_sum": 10,
        "sglang:generation_tokens_total": 15,
        "sglang:generation_tokens_histogram_sum": 15,
    }
    assert found | expected == found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_and_not_failed(decode: Role, stream: bool) -> None:
    asking = asyncio.create_task(decode.call("POST", "/generate", body(stream=stream)))
    await decode.begun()
    asking.cancel()
    await decode.over(7)
    found = summed(await decode.metrics())
    assert found["sglang:num_aborted_requests_total"] == 1
    assert found["kvflow_completion_seconds_count"] == 0


async def test_a_completion_that_is_told_to_end_is_aborted_too(decode: Role, met: None) -> None:
    decode.service.gate.clear()
    asking = asyncio.create_task(decode.post("/generate", body(rid="mine")))
    await until(lambda: decode.service.held)
    assert (await decode.post("/abort_request", {"rid": "mine"}))["aborted"] == 1
    await asking
    assert await outcomes(decode) == {("aborted", "false"): 1}


async def test_a_failure_is_counted_where_its_status_was_sent_before(
    decode: Role, met: None
) -> None:
    decode.service.fail_after = 1
    await decode.events("/generate", body())
    await decode.refused(500, "/generate", body(bootstrap_room=8))
    assert await outcomes(decode) == {("failed", "true"): 1, ("failed", "false"): 1}


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"sampling_params": {"temperature": -1}}, 400, "bad_request"),
        ({"input_ids": [1] * 1000, "text": None}, 400, "bad_request"),
        ({"bootstrap_room": None}, 400, "bad_request"),
        ({}, 503, "shutdown"),
    ],
)
async def test_refusals_before_a_room_exists_are_counted(
    decode: Role, changes: dict[str, Any], status: int, reason: str
) -> None:
    decode.pipeline.draining = status == 503
    await decode.refused(status, "/generate", body(**changes))
    counted = labelled(await decode.metrics(), "kvflow_requests_refused_total")
    assert counted == {(reason,): 1}
    assert await outcomes(decode) == {}


def exposed(metrics: RoleMetrics) -> str:
    raw = metrics.response().body
    assert isinstance(raw, bytes)
    return raw.decode()


def test_counts_of_a_role_have_their_labels(decode: Role) -> None:
    counted = {"requests_refused": {"bad_request": 2}, "internal_errors": {"step": 7}}
    report = replace(decode.service.report(), **counted)
    metrics = RoleMetrics(lambda: report)
    metrics.refused("bad_request")
    text = exposed(metrics)
    assert labelled(text, "kvflow_requests_refused_total") == {("bad_request",): 3}
    assert labelled(text, "kvflow_internal_errors_total") == {("step",): 7}


def report_of(node: PrefillNode | DecodeNode) -> Report:
    base = FakeService(node.role, None).report()  # type: ignore[arg-type]
    failed = {(where, str(code)): n for (where, code), n in node.counts.failures.items()}
    return replace(base, transfers=node.counts.transfers, rooms_failed=failed)


def exposition(node: PrefillNode | DecodeNode) -> str:
    return exposed(RoleMetrics(lambda: report_of(node), role=node.role, model="m", sglang=True))


async def test_transfers_are_measured_where_they_happen(kvflow_pair: Pair) -> None:
    p, moved = kvflow_pair, 0
    for room in range(3):
        source, target = await p.open(room, PROMPT)
        await source.matched()
        p.send_all(source, chunks=2)
        await target.landed()
        await source.done()
        moved += source.bytes_total
        target.close()
    await p.rest()
    sent, received = (summed(exposition(node)) for node in (p.prefill, p.decode))
    assert moved > 0
    expected = {
        "kvflow_bootstrap_seconds_count": 3,
        "kvflow_transfer_seconds_count": 3,
        "kvflow_room_bytes_count": 3,
        "kvflow_room_bytes_sum": moved,
        "kvflow_transfer_bytes_per_second_count": 3,
        "sglang:num_bootstrap_failed_reqs_total": 0,
        "sglang:num_transfer_failed_reqs_total": 0,
    }
    for found in (sent, received):
        assert found | expected == found
        assert all(f"sglang:kv_transfer_{name}_count" in found for name in TRANSFER_NAMES)
        assert all(f"sglang:num_{queue}_queue_reqs" in found for queue in QUEUES)
        assert {
            f"sglang:num_{state}_reqs" for state in ("running", "queue", "retracted")
        } <= found.keys()
    assert sent["sglang:kv_transfer_total_mb_sum"] == moved / (1 << 20)
    for found, counts in ((sent, [3, 3, 3, 0, 3]), (received, [0, 0, 3, 3, 0])):
        assert [found[f"sglang:kv_transfer_{name}_count"] for name in TRANSFER_NAMES] == counts


STEPS_MS = "1 2 5 10 25 50 100 250 500 1000 2500"
FIRST_TOKENS_S = ".1 .2 .4 .6 .8 1 2 4 6 8 10 20 40 60 80 100 200 400"
LENGTHS = (
    "100 300 500 700 1000 1500 2000 3000 4000 5000 6000 7000 8000 9000 10000 12500 15000 17500 "
    "20000 22500 25000 27500 30000 35000 40000 60000 80000 100000 200000 300000 400000 600000 "
    "800000 1000000 1100000"
)
BUCKETS = {
    "time_to_first_token_seconds": FIRST_TOKENS_S,
    "e2e_request_latency_seconds": f"{FIRST_TOKENS_S} 600 1200 1800 2400",
    "inter_token_latency_seconds": (
        ".002 .004 .006 .008 .01 .015 .02 .025 .03 .035 .04 .06 .08 .1 .2 .4 .6 .8 1 2 4 6 8"
    ),
    "prompt_tokens_histogram": LENGTHS,
    "generation_tokens_histogram": LENGTHS,
    "kv_transfer_latency_ms": f"{STEPS_MS} 5000",
    "kv_transfer_bootstrap_ms": STEPS_MS,
    "kv_transfer_alloc_ms": STEPS_MS,
    "kv_transfer_speed_gb_s": ".1 .5 1 5 10 25 50 100 200 400",
    "kv_transfer_total_mb": "1 5 10 50 100 500 1000 5000 10000",
}


async def test_dashboards_find_the_buckets_of_sglang(kvflow_pair: Pair) -> None:
    """Quantiles over a fleet of both are right only where both have the same bounds."""
    found: dict[str, list[float]] = {}
    of_a_rank = {
        "model_name": "m",
        "engine_type": "prefill",
        "tp_rank": "0",
        "pp_rank": "0",
        "moe_ep_rank": "0",
    }
    for sample in samples_of(exposition(kvflow_pair.prefill), "sglang:"):
        name = sample.name.removeprefix("sglang:")
        labels = dict(sample.labels)
        bound = float(labels.pop("le", 0))
        if name.startswith("kv_transfer"):
            assert labels == of_a_rank
        if name.endswith("_bucket"):
            bounds = found.setdefault(name.removesuffix("_bucket"), [])
            if bound not in bounds:
                bounds.append(bound)
    del found["queue_time_seconds"]  # its bounds are those of the engine's own histogram
    assert found == {
        name: [*map(float, bounds.split()), float("inf")] for name, bounds in BUCKETS.items()
    }


async def test_failures_are_told_apart_by_phase(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    source, target = await p.open(1, PROMPT)
    await source.matched()
    p.send_all(source, chunks=2)
    source.close(Cause(Code.TRANSFER_ERROR, "the wire was cut"))
    await p.rest()
    _, target = await p.open(2, PROMPT)
    target.close()  # its client left
    await p.rest()
    lonely = await p.decode.room(3, "sim", PROMPT)
    p.prefill.refuse(3, Cause(Code.CAPACITY, "prefill is full"))
    with pytest.raises(Exception, match="prefill is full"):
        await lonely.landed()
    await p.rest()
    for node in (p.prefill, p.decode):
        assert dict(node.counts.failures)[("transfer", Code.TRANSFER_ERROR)] == 1
        assert {where for where, _ in node.counts.failures} <= {"transfer", "bootstrap"}
    assert p.decode.counts.failures["bootstrap", Code.CAPACITY] == 1


def ending(code: Code | None, *, moving: bool) -> RoomEnding:
    return RoomEnding(
        phase=DecodePhase.FAILED,
        cause=None if code is None else Cause(code),
        counts=(1,),
        offers_pages=True,
        opened_at_s=0.0,
        ready_at_s=0.5,
        moving_at_s=1.0 if moving else None,
    )


@pytest.mark.parametrize(
    ("code", "moving", "where"),
    [
        (None, True, ""),
        (Code.CLIENT_GONE, True, ""),
        (Code.PEER_LOST, False, "bootstrap"),
        (Code.PEER_LOST, True, "transfer"),
        (Code.TRANSFER_ERROR, True, "transfer"),
        (Code.DEADLINE, True, "transfer"),
        (Code.RENDEZVOUS, True, "bootstrap"),
        (Code.REFUSED, False, "bootstrap"),
        (Code.PROMPT_MISMATCH, True, "bootstrap"),
        (Code.ENGINE_ERROR, False, "engine"),
        (Code.ENGINE_ERROR, True, "engine"),
    ],
)
def test_where_a_room_failed(code: Code | None, moving: bool, where: str) -> None:
    assert failed_in(ending(code, moving=moving)) == where


def test_every_code_is_classed() -> None:
    counts = Counts()
    for code in Code:
        counts.ended.append((ending(code, moving=True), 2.0))
    assert sum(counts.failures.values()) == len(Code) - 2
    assert {where for where, _ in counts.failures} == {"bootstrap", "transfer", "engine"}


def test_a_histogram_counts_a_bound_as_below_itself() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 2.5):
        histogram.observe(value)
    histogram.observe(10, times=3)
    assert histogram.cumulative() == [(1, 2), (2, 4), (float("inf"), 8)]
    assert (histogram.count, histogram.sum) == (8, 37.5)


def test_tokens_share_the_time_since_the_last_ones_of_their_completion() -> None:
    measures = CompletionMeasures()
    meter = RequestMeter(measures, 100.0, stream=True)
    both: Any = [SimpleNamespace(prompt=[1], room=room) for room in (1, 2)]
    meter.begin(both)
    for index, tokens, now in (
        (0, 1, 101.0),
        (1, 1, 102.0),
        (0, 2, 105.0),
        (0, 1, 106.0),
        (1, 1, 108.0),
    ):
        meter.add(index, tokens, now)
    assert measures.first_token_seconds[True].sum == 1.0 + 2.0
    assert measures.inter_token_seconds.sum == 2 * 2.0 + 1.0 + 6.0


def test_throughput_is_of_whole_seconds_and_forgets() -> None:
    found = Throughput()
    for tenth in range(200):
        found.add(5, tenth / 10)
    assert found.per_second(20.0) == 50 and found.per_second(20.5) == 50
    assert found.per_second(20.0 + THROUGHPUT_WINDOW_S / 2) == 25 and found.per_second(100.0) == 0
    assert len(found._seconds) <= THROUGHPUT_WINDOW_S + 1
