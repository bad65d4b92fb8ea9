"""Playing a trace: when requests are sent, and what is read from their answers."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence

from kvflow.plan.fleet import CpuTime, Played, Started, play, slowed_by
from kvflow.plan.trace import Request, Trace
from kvflow.serve.config.settings import Settings

ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b'data: {"usage": {"cached_tokens": 3}}\n\ndata: [DONE]\n\n'
)


class Watched(Started):
    """Records the lengths of prompts in the order in which they are sent."""

    def __init__(self, url: str) -> None:
        super().__init__(url, Settings(), [], [], [])
        self.lengths: list[int] = []

    async def ask(self, ids: Sequence[int], new_tokens: int) -> Played:
        self.lengths.append(len(ids))
        return await super().ask(ids, new_tokens)


async def test_requests_of_a_group_are_sent_in_the_order_of_the_trace() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        # A body that is left unread would reset the connection.
        await reader.readexactly(int(head.split(b"Content-Length: ")[1].split()[0]))
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    lengths = list(range(1, 301))
    requests = [Request(1 + tokens // 20 / 50, tokens, 1, (tokens,)) for tokens in lengths]
    async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=300) as server:
        port = server.sockets[0].getsockname()[1]
        fleet = Watched(f"http://127.0.0.1:{port}")
        outcomes = await play(fleet, Trace(requests, 512), 60)
    assert fleet.lengths == lengths
    assert [one.request for one in outcomes] == requests
    assert {one.cached_tokens for one in outcomes} == {3}
    assert [one for one in outcomes if not 0 < one.first_s <= one.end_s] == []


def test_only_the_busiest_thread_of_each_worker_counts_as_waiting() -> None:
    times = {
        ("prefill", 1): CpuTime(4.0, 2.0),
        ("prefill", 2): CpuTime(0.1, 3.0),
        ("prefill", 3): CpuTime(6.0, 3.0),
        ("decode", 4): CpuTime(9.0, 9.0),
    }
    assert slowed_by(times, "prefill", 2) == 1.5
    assert slowed_by(times, "decode", 1) == 2.0
    assert slowed_by({}, "decode", 1) == 1.0


def test_cpu_times_are_those_of_this_processs_threads() -> None:
    fleet = Started("", Settings(), [], [], [("decode", os.getpid())])
    before = fleet.cpu_times()
    begun_s = time.thread_time()
    while time.thread_time() < begun_s + 0.05:
        pass
    spent = fleet.cpu_times(before)["decode", threading.get_native_id()]
    assert spent.ran_s >= 0.05 and spent.waited_s >= 0
