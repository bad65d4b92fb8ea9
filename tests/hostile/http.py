"""An attack on every HTTP socket of a fleet: broken HTTP, broken JSON, wrong types, bombs, bodies
that never end.

    python -m tests.hostile http --each 10000

Whatever is answered is a 4xx; nothing of it is an error of ours, nothing stays behind, good
requests go on as before.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import psutil

from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import all_home, running
from tests.hostile.frames import COMMON
from tests.hostile.nodes import Report
from tests.hostile.storm import answer, gauges, request

LANES = 32
ANSWER_S = 0.5  # what has no answer by then waits for bytes that never come
ROUTES = (b"/generate", b"/v1/chat/completions", b"/v1/completions")
PATHS = (b"/ranks/0", b"/rooms/x", b"/../etc", b"/%00", b"/\xff", b"*", b"/" + b"a" * 9000)
SHALLOW: tuple[Any, ...] = (None, True, -1, 2**70, "", "\0", "x" * 10_000)
NESTED: tuple[Any, ...] = ([], [[]], {}, {"a": [{}]}, [None], [-1])
ODD = SHALLOW + NESTED
MEETING = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1}
SAMPLING = {"temperature": 0, "max_new_tokens": 1, "stop": ["x"], "n": 1}
GOOD: dict[str, Any] = {
    "text": "class",
    "stream": False,
    "rid": "r",
    "return_logprob": False,
    "sampling_params": SAMPLING,
    **MEETING,
}
BOMBS = (
    *(b"[" * 50_000, b'{"a":' * 50_000, b'{"messages":[' + b"{}," * 300_000),
    *(b'{"input_ids":[' + b"[]," * 300_000 + b"[]]}", b'{"text":"' + b"a" * (9 << 20) + b'"}'),
)


def posted(path: bytes, body: bytes, *more: bytes, length: int | None = None) -> bytes:
    """A POST; `length` is what it says of its body."""
    size = len(body) if length is None else length
    return b"\r\n".join(
        (b"POST %s HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % size, *more, b"", body)
    )


def bodies(rng: random.Random) -> bytes:
    """Bad JSON, or good JSON that is no request."""
    document: dict[str, Any] = dict(GOOD)
    match rng.randrange(4):
        case 0:
            # Msgpack where JSON belongs.
            frame = rng.choice(COMMON)(rng, msgspec.msgpack.encode([3, 7]))
            return frame
        case 1:
            document["sampling_params"] = {
                **GOOD["sampling_params"],
                "max_new_tokens": rng.choice((0, -1, "x", [], {})),
            }
        case 2:
            document[rng.choice(("text", "messages", "prompt"))] = rng.choice((5, {}, [5], [[]]))
            document["input_ids"] = [-1]
        case _:
            raw = msgspec.json.encode(document)
            return raw[: rng.randrange(len(raw))]
    document[rng.choice(list(GOOD))] = rng.choice(ODD)
    return msgspec.json.encode({**document, "text": 5, "messages": 5, "prompt": {}})


def wire(rng: random.Random) -> bytes:
    """Bytes that are no request any role serves."""
    path = rng.choice(ROUTES if rng.random() < 0.7 else PATHS)
    body = bodies(rng)
    chunked = b"Transfer-Encoding: chunked"
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n" % path
    match rng.randrange(14):
        case 0 | 1 | 2 | 3 | 4:
            return posted(path, body, b"Content-Type: application/json")
        case 5:
            return (
                head
                + chunked
                + b"\r\n\r\n"
                + rng.choice(
                    (
                        b"zz\r\n",
                        b"-1\r\n",
                        b"ffffffffffffffffff\r\n",
                        b"5\r\nab",
                        b"3\r\nabcd\r\n0\r\n\r\n",
                    )
                )
            )
        case 6:
            return posted(path, body, chunked)  # both lengths: how requests are smuggled
        case 7:
            return (
                head
                + rng.choice(
                    (
                        b"Content-Length: -1",
                        b"Content-Length: 1\r\nContent-Length: 2",
                        b"Content-Length: x",
                    )
                )
                + b"\r\n\r\n"
            )
        case 8:
            return posted(
                path,
                body,
                rng.choice(
                    (
                        b"A: " + b"b" * 20_000,
                        b"A\0: b",
                        b": b",
                        b"A : b\x01",
                        b"Content-Encoding: gzip",
                    )
                ),
            )
        case 9:
            return (
                rng.choice((b"GET", b"BREW", b"P\xc3\xb6ST", b""))
                + b" "
                + path
                + b" HTTP/"
                + rng.choice((b"1.1", b"9.9", b"x"))
                + b"\r\n\r\n"
            )
        case 10:
            return rng.randbytes(rng.randint(1, 400))
        case 11:
            return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(20)
        case 12:
            # The rest never comes.
            return posted(path, body, length=len(body) + rng.randint(1, 1 << 40))
        case _:
            return posted(
                path,
                rng.choice(BOMBS) if rng.random() < 0.02 else body,
                b"Expect: 100-continue",
                b"Connection: close",
            )


async def one(port: int, raw: bytes, seen: Counter[str]) -> None:
    """Send it, take what is answered, leave."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(raw)
                answered = await reader.read(200)
                while answered.startswith(b"HTTP/1.1 100") and (more := await reader.read(200)):
                    answered = more
            finally:
                writer.close()
        status = re.match(rb"HTTP/1\.[01] (\d+)", answered)
        seen[status[1].decode() if status else "closed"] += 1
    except TimeoutError:
        seen["no answer"] += 1
    except OSError:
        seen["closed"] += 1


async def speed(session: aiohttp.ClientSession, fleet: Fleet, count: int) -> float:
    """Good requests a second, eight at a time; every answer is looked at."""
    left = iter(range(count))
    want = await answer(session, fleet.url, request(DEMO_PROMPTS[0], 4, False))

    async def lane() -> None:
        for i in left:
            assert (
                await answer(session, fleet.url, request(DEMO_PROMPTS[0], 4, bool(i % 2))) == want
            )

    started = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(8)))
    return count / (time.perf_counter() - started)


async def run(each: int = 10_000, seed: int = 0, good: int = 100, loris: int = 50) -> Report:
    """`each` to every socket of a fleet, beside connections that send a byte and no more."""
    rng = random.Random(seed)
    async with (
        running() as fleet,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        ports = {child.role: int(child.url.rsplit(":", 1)[1]) for child in fleet.children}
        ports["registry"] = fleet.prefills[0].bootstrap_port or 0
        workers = {child.role: psutil.Process(child.process.pid) for child in fleet.children}
        await speed(session, fleet, good)
        before = [await speed(session, fleet, good) for _ in range(5)]
        files = {role: process.num_fds() for role, process in workers.items()}
        slow = [
            await asyncio.open_connection("127.0.0.1", port)
            for port in ports.values()
            for _ in range(loris)
        ]
        for _, writer in slow:
            writer.write(b"P")
        seen: dict[str, Counter[str]] = {}
        for role, port in ports.items():
            counts = seen[role] = Counter()
            left = iter(range(each))

            async def lane(
                port: int = port, left: Any = left, counts: Counter[str] = counts
            ) -> None:
                for _ in left:
                    await one(port, wire(rng), counts)

            await asyncio.gather(*(lane() for _ in range(LANES)))
        home = await all_home(session, fleet.prefills[0].url, fleet.decodes[0].url)
        after = [await speed(session, fleet, good) for _ in range(5)]
        for _, writer in slow:
            writer.close()
        await asyncio.sleep(0.5)
        b, a = statistics.median(before), statistics.median(after)
        return {
            "each": each,
            "loris": len(slow),
            "answers": {role: dict(sorted(counts.items())) for role, counts in seen.items()},
            "exited": [
                child.role for child in fleet.children if child.process.returncode is not None
            ],
            "gauges_not_0": await gauges(session, fleet),
            "pages_home": home,
            "open_files_grown_by": {
                role: process.num_fds() - files[role] for role, process in workers.items()
            },
            "requests_per_s": {
                "before": round(b, 1),
                "after": round(a, 1),
                "ratio": round(a / b, 3),
            },
            "complaints": {
                child.role: [line for line in child.last_lines if "Error" in line]
                for child in fleet.children
            },
        }


def faults(report: Report) -> list[str]:
    """An answer that is neither a 4xx nor none, a process that left, something left behind."""
    found = []
    for role, counts in report["answers"].items():
        found += [
            f"{role}: {n} answers {status}"
            for status, n in counts.items()
            if status[0] not in "4nc"
        ]
    found += [f"{role} says {lines[-1]}" for role, lines in report["complaints"].items() if lines]
    found += [f"{role} has ended" for role in report["exited"]]
    found += [f"{name} is {value}" for name, value in report["gauges_not_0"].items()]
    found += [
        f"{role}: {n} more open files"
        for role, n in report["open_files_grown_by"].items()
        if n > 16
    ]
    return found + ([] if report["pages_home"] else ["pages are away"])
