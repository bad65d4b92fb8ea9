"""What clients and pages meet when something fails: kvflow beside SGLang's own mooncake backend.

    make sglang ARGS="-k nothing"                           # once: installs SGLang
    python tests/sglang/failures.py                         # every case, both backends: an hour
    python tests/sglang/failures.py --case killed-prefill --backend kvflow

It prints a table with a line for each case and backend. A case ends after a minute, whatever hangs:
what has not come by then counts as lost. Every prompt that is answered is compared with what one
SGLang answers, and so are the requests that come after the failure and use the same pages again.
test_failures.py runs some of the cases with kvflow. The exit status is 1 if kvflow's row of any
case has a wrong token, a lost page or a client without an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
import psutil
import zmq
import zmq.asyncio

from tests.engines import at_once, random_prompt, start_all, stop_all
from tests.sglang.asking import new_session, random_prompts
from tests.sglang.failing import (
    COUNT,
    PATIENCE_S,
    Pair,
    Request,
    Row,
    Shape,
    frozen,
    kill,
    leave,
    load_of,
)
from tests.sglang.servers import Server
from tests.vllm.models import make_model

LONGEST = 4096  # tokens of a prompt and its answer
GONE = 200  # clients that leave
RETRACTED = 200  # requests to a decode with a small cache
SMALL_POOL = 2048  # tokens of that cache
BACKENDS = ("kvflow", "mooncake")
PLAIN = Shape()
STAGES = Shape(ranks={"stages": 2})
# With SGLang's own reserve for each request it admits too few to retract any.
SMALL = Shape(
    decode_words=("--max-total-tokens", str(SMALL_POOL), "--num-reserved-decode-tokens", "8")
)
SMALL_PREFILL = Shape(prefill_words=("--max-total-tokens", str(SMALL_POOL)))


# --- clients


async def clients_gone(pair: Pair, row: Row) -> None:
    """GONE clients leave at a random moment: at both servers, or at one, which must tell the other.

    Others beside them stay, and use the pages of those that left.
    """
    others: list[float] = []
    ended = asyncio.Event()

    async def gone(number: int) -> None:
        request = Request(pair, random_prompt(pair.rng, pair.rng.randrange(200, 1400)), 200)
        await asyncio.sleep(pair.rng.uniform(0.02, 1.5))
        legs = ("prefill decode", "prefill", "decode")[number % 3]
        left_s = time.monotonic()
        for name in legs.split():
            if (task := request.leg(name)) is not None:
                task.cancel()
        tasks = [task for name in ("prefill", "decode") if (task := request.leg(name))]
        _, waiting = await asyncio.wait(tasks, timeout=PATIENCE_S)
        row.unanswered += len(waiting)
        await leave(request)
        if legs != "prefill decode" and not waiting:
            others.append(time.monotonic() - left_s)

    async def stays() -> None:
        while not ended.is_set():
            found = await pair.verdict(random_prompt(pair.rng, pair.rng.randrange(1, 1400)))
            row.right += found == "right"
            row.wrong += found == "wrong"
            row.errors += found == "error"
            row.unanswered += found == "no answer"

    beside = [asyncio.create_task(stays()) for _ in range(2)]
    await at_once(6, [partial(gone, number) for number in range(GONE)])
    since_s = time.monotonic()
    ended.set()
    await asyncio.gather(*beside)
    await pair.watch(row, [], since_s)
    row.knows_s = max(others, default=None)
    row.notes.append(f"{GONE} left")


async def one_leg(pair: Pair, row: Row, leg: str) -> None:
    since_s = time.monotonic()
    request = Request(pair, pair.prompts(1, 300)[0], legs=leg)
    await pair.watch(row, [request], since_s, leg)


async def refused(pair: Pair, row: Row, role: str) -> None:
    """One server refuses a prompt that is longer than its cache, and the other one takes it."""
    since_s = time.monotonic()
    requests = [Request(pair, prompt) for prompt in pair.prompts(2, SMALL_POOL + 200)]
    await pair.watch(row, requests, since_s, "prefill" if role == "decode" else "decode")


# --- processes


async def killed(pair: Pair, row: Row, role: str) -> None:
    """The other one's leg is the one that knows: a router sees at once that this one is gone."""
    requests = await pair.in_transfer()
    victim = pair.servers[role]
    since_s = time.monotonic()
    await kill(victim)
    await pair.watch(row, requests, since_s, "prefill" if role == "decode" else "decode")
    await pair.start(victim)


async def freezes(pair: Pair, row: Row, role: str, seconds: float) -> None:
    requests = await pair.in_transfer()
    since_s = time.monotonic()

    async def hold() -> None:
        async with frozen(pair.servers[role]):
            await asyncio.sleep(seconds)

    holding = asyncio.create_task(hold())
    # If decode is frozen, prefill's answer is the one that can come.
    await pair.watch(row, requests, since_s, "prefill" if role == "decode" else "decode")
    await holding


async def other_ranks(pair: Pair, row: Row, **shape: int) -> None:
    """A prefill ends, and one with other ranks starts at its address; afterwards it returns."""
    assert await pair.verdict(pair.prompts(1)[0]) == "right"
    await pair.stop(pair.prefill)
    before, pair.prefill = pair.prefill, pair.new_prefill(at=pair.prefill, **shape)
    await pair.start(pair.prefill)
    since_s = time.monotonic()
    try:
        await pair.watch(row, [Request(pair, each) for each in pair.prompts(6, 600)], since_s)
    finally:
        await pair.stop(pair.prefill)
        pair.prefill = before
        await pair.start(before)


# --- messages


async def malformed(pair: Pair, row: Row, role: str) -> None:
    """What nobody should send, at the bootstrap port and at every port that speaks ZMTP."""
    server = pair.servers[role]
    if role == "prefill":
        await to_bootstrap(pair.session, server.bootstrap_port)
    ports = [port for port in listening(server) if await speaks_zmtp(port)]
    row.notes.append(f"{len(ports)} ZMTP ports")
    for port in ports:
        await to_control(port)
    since_s = time.monotonic()
    await pair.watch(row, [Request(pair, each) for each in pair.prompts(4, 600)], since_s)


async def to_bootstrap(session: aiohttp.ClientSession, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    for body in (b"", b"\xff\xfe", b"[" * 5000, b"[]", b"null", b'{"attn_tp_size": "x"}'):
        for path in ("/route", "/register_dp_rank", "/query_dp_ranks"):
            for method in ("PUT", "POST"):
                with suppress(aiohttp.ClientError):
                    async with session.request(method, url + path, data=body) as answer:
                        await answer.read()
    words = "prefill_dp_rank=x&prefill_cp_rank=0&target_tp_rank=-7&target_pp_rank=999999999999"
    for path in (f"/route?{words}", "/ranks?x=%00", "/none"):
        async with session.get(url + path) as answer:
            await answer.read()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\x00\x01not HTTP\r\n\r\n")
    await writer.drain()
    writer.close()


def listening(server: Server) -> Iterator[int]:
    """TCP ports of the schedulers of a server, in which the control links run."""
    for process in server.schedulers():
        for link in process.net_connections(kind="tcp"):
            if link.status == psutil.CONN_LISTEN:
                yield link.laddr.port


async def speaks_zmtp(port: int) -> bool:
    """A ZMTP peer greets first: with 0xff, eight bytes, and 0x7f."""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                greeting = await reader.readexactly(10)
            finally:
                writer.close()
        return greeting[0] == 0xFF and greeting[9] == 0x7F
    return False


MESSAGES: tuple[list[bytes], ...] = (
    [b""],
    [b"x"],
    [b"\xff\xfe\xfd"],
    [b"None", b"127.0.0.1", b"1"],
    [b"12345", b"127.0.0.1", b"1", b"nobody", b"", b"", b"", b"many"],
    [b"ABORT", b"x"],
    [b"", b"\xc1" * 64],
)


async def to_control(port: int) -> None:
    """As SGLang's PUSH sockets and as kvflow's DEALER sockets."""
    context = zmq.asyncio.Context()
    for kind in (zmq.PUSH, zmq.DEALER):
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for message in MESSAGES:
            with suppress(zmq.Again):
                await socket.send_multipart(message)
        socket.close()
    await asyncio.to_thread(context.term)


# --- pipeline stages


async def stage_aborted(pair: Pair, row: Row) -> None:
    """Clients leave while the second stage is frozen: the first one knows of them, and the second
    one does not.
    """
    second = pair.prefill.schedulers()[1]
    requests = [Request(pair, prompt) for prompt in pair.prompts(4, 600)]
    second.suspend()
    try:
        requests += [Request(pair, prompt) for prompt in pair.prompts(4, 600)]
        await asyncio.sleep(1)
        for request in requests:
            for name in ("prefill", "decode"):
                if (task := request.leg(name)) is not None:
                    task.cancel()
        await asyncio.sleep(1)
    finally:
        second.resume()
    since_s = time.monotonic()
    await pair.watch(row, [], since_s)
    await early_leavers(pair, row)


async def early_leavers(pair: Pair, row: Row) -> None:
    """Clients that leave decode, or both, within the moments in which the stages bootstrap."""

    async def gone(number: int) -> None:
        request = Request(pair, random_prompt(pair.rng, 300))
        await asyncio.sleep(pair.rng.uniform(0, 0.15))
        names = ("decode",) if number % 2 else ("prefill", "decode")
        left_s = time.monotonic()
        for name in names:
            if (task := request.leg(name)) is not None:
                task.cancel()
        tasks = [task for name in ("prefill", "decode") if (task := request.leg(name))]
        _, waiting = await asyncio.wait(tasks, timeout=PATIENCE_S)
        row.unanswered += len(waiting)
        if len(names) == 1 and not waiting:
            row.knows_s = max(row.knows_s or 0.0, time.monotonic() - left_s)
        await leave(request)

    await at_once(4, [partial(gone, number) for number in range(40)])
    since_s = time.monotonic()
    knows_s = row.knows_s
    await pair.watch(row, [], since_s)
    row.knows_s = knows_s
    row.notes.append("8 and 40 left")


# --- memory


async def retraction(pair: Pair, row: Row) -> None:
    prompts = random_prompts(pair.rng, RETRACTED, 400)
    began_s = time.monotonic()
    found = await at_once(
        12, [partial(pair.verdict, prompt, 100, 2 * PATIENCE_S) for prompt in prompts]
    )
    row.notes.append(f"{time.monotonic() - began_s:.0f} s")
    row.notes.append(f"{pair.decode.text().count('KV cache pool is full')} retractions")
    await pair.watch(row, [], time.monotonic())
    row.right, row.wrong = found.count("right"), found.count("wrong")
    row.errors, row.unanswered = found.count("error"), found.count("no answer")


# --- all of them


class Case(NamedTuple):
    text: str
    shape: Shape
    run: Callable[[Pair, Row], Awaitable[None]]


CASES: dict[str, Case] = {
    "clients-gone": Case("clients leave in mid-transfer", PLAIN, clients_gone),
    "leg-prefill": Case("decode's leg never comes", PLAIN, partial(one_leg, leg="prefill")),
    "leg-decode": Case("prefill's leg never comes", PLAIN, partial(one_leg, leg="decode")),
    "frozen-prefill-5": Case(
        "prefill frozen for 5 s", PLAIN, partial(freezes, role="prefill", seconds=5)
    ),
    "frozen-prefill-40": Case(
        "prefill frozen for 40 s", PLAIN, partial(freezes, role="prefill", seconds=40)
    ),
    "frozen-decode-5": Case(
        "decode frozen for 5 s", PLAIN, partial(freezes, role="decode", seconds=5)
    ),
    "frozen-decode-40": Case(
        "decode frozen for 40 s", PLAIN, partial(freezes, role="decode", seconds=40)
    ),
    "killed-prefill": Case("prefill killed", PLAIN, partial(killed, role="prefill")),
    "killed-decode": Case("decode killed", PLAIN, partial(killed, role="decode")),
    "malformed-prefill": Case(
        "malformed messages to prefill", PLAIN, partial(malformed, role="prefill")
    ),
    "malformed-decode": Case(
        "malformed messages to decode", PLAIN, partial(malformed, role="decode")
    ),
    "other-stages": Case(
        "a prefill with two stages at its address", PLAIN, partial(other_ranks, stages=2)
    ),
    "other-ranks": Case(
        "a prefill with two shards at its address",
        PLAIN,
        partial(other_ranks, ranks=2, decode_tp_size=1),
    ),
    "stage-aborted": Case("clients leave before the second stage knows", STAGES, stage_aborted),
    "refused-prefill": Case(
        "prefill refuses what decode takes", SMALL_PREFILL, partial(refused, role="prefill")
    ),
    "refused-decode": Case(
        "decode refuses what prefill takes", SMALL, partial(refused, role="decode")
    ),
    "retraction": Case("decode retracts requests", SMALL, retraction),
}


async def one_case(name: str, pair: Pair) -> Row:
    """Run a case on a pair that serves, and leave one that serves again."""
    case = CASES[name]
    row = Row(case.text, pair.backend)
    logs = {role: len(server.text()) for role, server in pair.servers.items()}
    await case.run(pair, row)
    for role, server in pair.servers.items():
        # A server that was started again has a new log.
        text = server.text()
        text = text[logs[role] :] if len(text) >= logs[role] else text
        if count := text.count("Traceback (most recent call last)"):
            row.notes.append(f"{count} tracebacks at {role}")
    await pair.serve(row)
    return row


async def is_well(pair: Pair) -> bool:
    """True if the next case may start with these servers."""
    loads = [await load_of(pair.session, server) for server in pair.servers.values()]
    if any(load is None or load.tokens or load.requests for load in loads):
        return False
    return await pair.verdict(pair.prompts(1, 300)[0], COUNT, 20) == "right"


async def run_cases(
    options: argparse.Namespace, model: Path, logs: Path, single: Server
) -> list[Row]:
    rows = []
    async with new_session() as session:
        for _, names in groupby(options.case, key=lambda name: id(CASES[name].shape)):
            wanted = list(names)
            for backend in options.backend:
                rng = random.Random(options.seed)
                settings = {"transfer_backend": options.plane}
                shape = CASES[wanted[0]].shape
                pair = Pair(backend, shape, model, logs, single, session, rng, **settings)
                try:
                    await pair.start()
                    for name in wanted:
                        rows.append(await one_case(name, pair))
                        print(rows[-1].line(), flush=True)
                        if name != wanted[-1] and not await is_well(pair):
                            await pair.stop()
                            await pair.start()
                finally:
                    await pair.stop()
    return rows


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--plane", default="mooncake", choices=["mooncake", "local", "nixl"])
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    options.backend = options.backend or list(BACKENDS)
    return options


def main() -> int:
    options = read_arguments()
    print(f"seed={options.seed} plane={options.plane}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = make_model("llama_wide", Path(folder) / "model", longest=LONGEST)
        single = Server("single", model, logs, "--max-total-tokens", "16384")
        try:
            start_all([single])
            print(Row.HEAD, flush=True)
            rows = asyncio.run(run_cases(options, model, logs, single))
        finally:
            stop_all([single])
    return 0 if all(row.is_harmless for row in rows if row.backend == "kvflow") else 1


if __name__ == "__main__":
    sys.exit(main())
