"""Traces of the router, and of workers on fakes, as a collector gets them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvflow.http import tracing as module
from kvflow.http.tracing import Tracing, check_collector, tracing_to
from kvflow.protocols.errors import Cause, Code, MisuseError
from kvflow.router.vllm_engine import VllmEngine
from kvflow.serve.http import tracing as of_workers
from tests.fakes.servers import Front, scripted
from tests.fakes.service import BODY, FakeService, Meeting, Role
from tests.fakes.vllm import CHAT, FakeVllm, ask
from tests.otlp import CLIENT, SERVER, Collector, Received
from tests.ports import free_port

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as made:
        yield made


@asynccontextmanager
async def traced_to(collector: Collector, role: str, ratio: float = 1.0) -> AsyncIterator[Tracing]:
    async with tracing_to(collector.url, ratio, role) as tracing:
        assert tracing is not None
        yield tracing


def named(spans: Sequence[Received], name: str) -> list[Received]:
    return [one for one in spans if one.name == name]


async def test_a_trace_goes_on_from_the_client_over_the_router_to_both_workers(
    collector: Collector, meeting: Meeting
) -> None:
    async with (
        traced_to(collector, "router") as router,
        traced_to(collector, "worker") as worker,
        Role(FakeService("prefill", meeting), tracing=worker) as prefill,
        Role(FakeService("decode", meeting), tracing=worker) as decode,
        Front([prefill], [decode], tracing=router) as front,
    ):
        answer = await front.call("POST", "/generate", {**BODY, "stream": True}, headers=SAMPLED)
        assert answer.status == 200
    # Leaving the blocks has sent all spans.
    spans = collector.spans
    assert {one.trace for one in spans} == {TRACE}
    [root] = [one for one in spans if one.parent == CALLER]
    assert (root.service, root.name, root.kind) == ("kvflow-router", "POST /generate", SERVER)
    assert root.began_ns <= root.events["first token"] <= root.ended_ns
    first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < first_s <= (root.ended_ns - root.began_ns) / 1e9
    assert root.attributes["kvflow.request_id"] == answer.headers["X-Request-ID"]
    for role, served in (("prefill", prefill), ("decode", decode)):
        [leg] = named(spans, f"{role} leg")
        assert (leg.parent, leg.kind) == (root.id, CLIENT)
        assert leg.attributes["server.port"] == served.port
        [below] = [one for one in spans if one.parent == leg.id]
        assert (below.service, below.kind) == ("kvflow-worker", SERVER)
        assert below.attributes["kvflow.role"] == role
        assert below.attributes["gen_ai.request.model"] == "fake"
        assert not leg.failed and not below.failed
        # Decode's stream begins before the router relays it; prefill's may begin later.
        took_s = below.attributes["gen_ai.response.time_to_first_chunk"]
        assert took_s > 0 and (role == "prefill" or took_s <= first_s)
    [generation] = named(spans, "generation")
    assert generation.attributes["gen_ai.usage.output_tokens"] == 3
    assert [
        one.attributes["gen_ai.usage.input_tokens"]
        for one in spans
        if one.kind == SERVER and one is not root
    ] == [1, 1]


async def test_each_try_has_its_legs_and_errors_their_codes(
    collector: Collector, prefill: Role, decode: Role, spare: Role
) -> None:
    decode.service.failure = Cause(Code.SHUTDOWN, "it drains")
    async with (
        traced_to(collector, "router") as router,
        Front([prefill], [decode, spare], tracing=router) as front,
    ):
        await front.post("/generate", BODY)
        prefill.service.failure = Cause(Code.ENGINE_ERROR, "a step failed")
        await front.refused(500, "/generate", BODY)
        await front.refused(400, "/generate", {**BODY, "sampling_params": {"n": 500}})
    spans = collector.spans
    good, failed, refused = sorted(
        (one for one in spans if one.kind == SERVER), key=lambda one: one.began_ns
    )
    assert "gen_ai.response.time_to_first_chunk" not in good.attributes, "it was no stream"
    legs = [one for one in named(spans, "decode leg") if one.parent == good.id]
    statuses = {one.attributes["http.response.status_code"]: one.failed for one in legs}
    assert statuses == {503: True, 200: False} and not good.failed
    assert failed.failed and failed.attributes["error.type"] == "engine_error"
    # A client's own error is named, and is none of the server's.
    assert refused.attributes["error.type"] == "bad_request" and not refused.failed
    assert [one for one in spans if one.parent == refused.id] == []


async def test_a_client_that_leaves_ends_all_spans(
    collector: Collector, prefill: Role, decode: Role
) -> None:
    prefill.service.gate.clear()
    async with (
        traced_to(collector, "router") as router,
        Front([prefill], [decode], tracing=router) as front,
    ):
        asking = asyncio.create_task(front.post("/generate", BODY))
        await prefill.begun()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(20):
            while front.router.running:
                await asyncio.sleep(0.01)
        prefill.service.gate.set()
    [root] = [one for one in collector.spans if one.kind == SERVER]
    assert root.attributes["error.type"] == "client_gone"
    assert root.attributes["http.response.status_code"] == 499
    legs = [one for one in collector.spans if one.kind == CLIENT]
    assert len(legs) == 2 and all(one.attributes["kvflow.closed_by_router"] for one in legs)


async def _heard(tracing: Tracing | None, headers: dict[str, str]) -> dict[str, list[str]]:
    """What a pair of workers gets as `traceparent` and `tracestate`."""
    heard: dict[str, list[str]] = {"traceparent": [], "tracestate": []}

    async def hear(http: web.Request) -> web.StreamResponse:
        for name, found in heard.items():
            found.append(http.headers.get(name, ""))
        return web.json_response({"text": ""})

    async with (
        scripted(hear, "prefill") as prefill,
        scripted(hear) as decode,
        Front([prefill], [decode], tracing=tracing) as front,
    ):
        answer = await front.call("POST", "/generate", BODY, headers=headers)
        assert answer.status == 200
    assert len(heard["traceparent"]) == 2
    return heard


def is_sampled(traceparent: str) -> bool:
    # The other bits of the flags say how the id was drawn.
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


async def test_a_trace_that_is_not_recorded_goes_on_but_is_not_sent(collector: Collector) -> None:
    async with traced_to(collector, "router") as router:
        unsampled = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
        for one in (await _heard(router, unsampled))["traceparent"]:
            assert one.split("-")[1] == TRACE and not is_sampled(one)
    async with traced_to(collector, "router", ratio=0.0) as router:
        assert not any(map(is_sampled, (await _heard(router, {}))["traceparent"]))
        # A client that samples its own trace decides.
        found = await _heard(router, SAMPLED)
        assert all(map(is_sampled, found["traceparent"]))
        assert found["tracestate"] == ["vendor=1"] * 2
    assert {one.trace for one in collector.spans} == {TRACE}
    assert len(collector.spans) == 3


@pytest.mark.parametrize("given", ["", "00-0-0-01", f"00-{TRACE}-{CALLER}", "\u00e9" * 9])
async def test_a_bad_traceparent_begins_a_new_trace(collector: Collector, given: str) -> None:
    async with traced_to(collector, "router") as router:
        found = await _heard(router, {"traceparent": given})
    traces = {one.split("-")[1] for one in found["traceparent"]}
    assert traces == {one.trace for one in collector.spans} and traces != {TRACE}
    assert [one.parent for one in collector.spans if one.kind == SERVER] == [""]


async def test_only_completions_are_traced(
    collector: Collector, prefill: Role, decode: Role
) -> None:
    async with (
        traced_to(collector, "router") as router,
        Front([prefill], [decode], tracing=router) as front,
    ):
        for path in ("/metrics", "/health", "/v1/models", "/server_info"):
            assert (await front.call("GET", path)).status == 200
        await front.post("/v1/tokenize", {"prompt": "w1"})
        await front.call("POST", "/nothing", {})
        await front.post("/v1/completions", {"prompt": "w1", "max_tokens": 2})
    assert {one.attributes.get("http.route") for one in collector.spans if one.kind == SERVER} == {
        "/v1/completions"
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_the_legs_of_vllm_follow_each_other_in_the_trace(
    collector: Collector, stream: bool
) -> None:
    async with (
        FakeVllm() as prefill,
        FakeVllm() as decode,
        traced_to(collector, "router") as router,
        Front([prefill], [decode], engine=VllmEngine(), tracing=router) as front,
    ):
        await ask(front, CHAT, stream=stream)
    [root] = [one for one in collector.spans if one.kind == SERVER]
    assert root.attributes["gen_ai.operation.name"] == "chat"
    [first], [second] = (named(collector.spans, f"{role} leg") for role in ("prefill", "decode"))
    assert root.began_ns <= first.began_ns <= first.ended_ns <= second.began_ns
    assert second.ended_ns <= root.ended_ns
    assert not first.failed and not second.failed


# --- without, and with a collector that is of no use


async def test_without_a_collector_the_clients_trace_goes_on_as_it_came() -> None:
    found = await _heard(None, SAMPLED)
    assert found["traceparent"] == [SAMPLED["traceparent"]] * 2
    assert found["tracestate"] == ["vendor=1"] * 2


async def test_without_a_collector_no_times_are_kept(
    monkeypatch: pytest.MonkeyPatch, prefill: Role, decode: Role
) -> None:
    def never() -> None:
        raise AssertionError("made for a request that is not traced")

    monkeypatch.setattr(of_workers, "Marks", never)
    async with Front([prefill], [decode]) as front:
        assert await front.post("/generate", BODY)


def test_without_a_collector_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, kvflow.serve.launch.router, kvflow.serve.launch.roles\n"
        "import kvflow.http.tracing as t\n"
        "assert t.check_collector('') == ''\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://h", "http://", "collector"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with pytest.raises(MisuseError, match=r"--otlp-endpoint: .* is no URL of a collector"):
        check_collector(url)


def test_the_path_for_traces_is_added_once() -> None:
    pytest.importorskip("opentelemetry.sdk")
    for given in ("http://h:1", "http://h:1/", "http://h:1/v1/traces"):
        assert check_collector(given) == "http://h:1/v1/traces"
    assert check_collector("https://h/otlp") == "https://h/otlp/v1/traces"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MisuseError, match=r"pip install 'kvflow\[otel\]'"):
        check_collector("http://localhost:4318")


async def test_a_collector_that_is_away_costs_one_line_a_minute(
    prefill: Role,
    decode: Role,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="make setup installs kvflow[otel]")
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 20.0)
    # The exporter gives a batch up after this time, tries again included.
    monkeypatch.setattr(module, "EXPORT_TIMEOUT_S", 1.0)
    async with (
        tracing_to(f"http://127.0.0.1:{free_port()}", 1.0, "router") as router,
        Front([prefill], [decode], tracing=router) as front,
    ):
        await front.post("/generate", BODY)
    [line] = [one for one in caplog.messages if "traces" in one]
    assert line.startswith("traces: ")
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


async def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(
    collector: Collector,
    prefill: Role,
    decode: Role,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 0.1)
    collector.open.clear()
    async with (
        traced_to(collector, "router") as router,
        Front([prefill], [decode], tracing=router) as front,
    ):
        for _ in range(3):
            await front.post("/generate", BODY)
    assert "the last spans were not sent within 0.1 s" in caplog.messages
    assert collector.spans == []
    collector.open.set()
    # The exporter's thread ends before the test does.
    await collector.until(9)
