"""Tokens per second of `kvflow up` beside stock `generate`, with the demo model."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest

from kvflow.bench import serve
from kvflow.bench.serve import HERE, ServePlan, bench_serve, cpu_of
from kvflow.bench.stream_client import Stream, StreamFailedError, unchunked
from tests.bench.fleets import serving


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
@pytest.mark.parametrize("api", ["generate", pytest.param("completions", marks=pytest.mark.soak)])
async def test_tokens_per_second_are_of_the_same_tokens_as_stocks(
    api: str, forked_roles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "serving", serving)
    said: list[str] = []
    plan = ServePlan(api=api, clients=(3,), new_tokens=12, turns=1, streams=4, stream_tokens=20)
    report = await bench_serve(plan, said.append)
    figures = report["clients"]["3"][HERE]
    assert 0 < figures["ratio"]["min"] <= figures["ratio"]["median"]
    assert figures["tokens_per_s"]["median"] > 0 < figures["first_token_ms"]["min"]
    beside = report["beside"][HERE]
    assert beside["router idle"]["gets"] == 100 and beside["decode beside"]["p99_ms"] > 0
    assert set(figures["cpu_us_per_token"]) == {"prefill", "decode", "router", "stock"}
    assert said


def test_cpu_time_of_a_process_is_that_of_its_own_clock() -> None:
    before_s = time.process_time()
    assert before_s <= cpu_of(os.getpid()) <= time.process_time()
    with pytest.raises(OSError, match="Invalid argument"):
        cpu_of(2**22 + 1)  # above the largest id


async def answered(answer: bytes) -> Stream:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        stream = Stream(f"http://{host}:{port}", "generate", [1, 2], 3, {})
        gate = asyncio.Event()
        gate.set()
        await stream.run(gate)
    return stream


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"data: " + json.dumps({"output_ids": ids}).encode() + b"\n\n" for ids in ([7], [7, 8])]


async def test_a_client_reads_events_however_they_are_cut() -> None:
    whole = b"".join(EVENTS) + b"data: [DONE]\n\n"
    assert unchunked(chunks(whole[:9], whole[9:])) == whole
    assert (await answered(HEAD + chunks(whole[:9], whole[9:]))).tokens() == [7, 8]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + chunks(EVENTS[0], b"data: [DONE]\n\n"),
        HEAD + chunks(*EVENTS),
        HEAD + chunks(*EVENTS, b'data: {"error": {"message": "gone"}}\n\n', b"data: [DONE]\n\n"),
        HEAD + EVENTS[0],
        b"",
    ],
)
async def test_a_broken_stream_is_no_measurement(answer: bytes) -> None:
    with pytest.raises(StreamFailedError):
        (await answered(answer)).tokens()
