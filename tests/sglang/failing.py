"""A prefill and a decode in which something fails, and what it does to clients and to pages.

`failures.py` has the failures; this module starts the servers, watches the requests, and counts the
tokens that a server holds.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from kvflow.testing.freezing import freeze
from tests.engines import Prompt, at_once, eventually, random_prompt, start_all, stop_all
from tests.sglang.asking import Answer, BothLegs, ask
from tests.sglang.servers import PAGE, Server

PATIENCE_S = 60.0
"""A client without an answer, and pages without an owner, for so long count as lost."""
GRACE_S = 30.0  # after the clients have left, until what a server still holds is lost
COUNT = 8  # tokens of an answer
LONG = 1400  # tokens of a prompt, whose pages have 46 MB
POOL = 16384  # tokens of a KV cache
_READ_S = 2.0
_QUEUES = (
    *("prefill_bootstrap_queue_reqs", "prefill_inflight_queue_reqs"),
    *("decode_prealloc_queue_reqs", "decode_transfer_queue_reqs", "decode_retracted_queue_reqs"),
)


class Load(NamedTuple):
    """What a server's scheduler published last: when (time.time), and what it holds."""

    at: float
    tokens: int  # of pages in use, without those of prefixes that nobody uses
    requests: int
    waiting_for_pages: int  # of decode's requests


async def load_of(session: aiohttp.ClientSession, server: Server) -> Load | None:
    """Return None for a server that does not answer."""
    try:
        async with (
            asyncio.timeout(_READ_S),
            session.get(f"{server.url}/v1/loads?include=core,disagg") as answer,
        ):
            (found,) = (await answer.json())["loads"]
    except (TimeoutError, aiohttp.ClientError, KeyError, ValueError):
        return None
    queues = found.get("disaggregation") or {}
    held = found["num_running_reqs"] + found["num_waiting_reqs"]
    held += sum(queues.get(name, 0) for name in _QUEUES)
    transfers = queues.get("decode_transfer_queue_reqs", 0)
    return Load(found["timestamp"], found["num_used_tokens"], held, transfers)


class Request:
    """A request whose legs are watched: when each of them ended."""

    def __init__(self, pair: Pair, prompt: Prompt, count: int = COUNT, **options: Any) -> None:
        """`options` are those of BothLegs."""
        self.prompt, self.count = prompt, count
        self.legs = BothLegs(pair.session, pair.prefill, pair.decode, prompt, count, **options)
        self.ended_at_s: dict[str, float] = {}
        for name in self.names:
            if (task := self.leg(name)) is not None:
                task.add_done_callback(partial(self._ended, name))

    @property
    def names(self) -> set[str]:
        """The legs that were sent."""
        return {name for name in ("prefill", "decode") if self.leg(name) is not None}

    def leg(self, name: str) -> asyncio.Task[Answer] | None:
        found: asyncio.Task[Answer] | None = getattr(self.legs, name)
        return found

    def _ended(self, name: str, _task: object) -> None:
        self.ended_at_s[name] = time.monotonic()

    def answer(self, name: str = "decode") -> Answer | None:
        """Return None for a leg that has not ended, or whose connection broke."""
        task = self.leg(name)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


@dataclass
class Row:
    """What one failure did. Times are seconds since it; None: not within PATIENCE_S."""

    case: str
    backend: str
    right: int = 0
    wrong: int = 0
    errors: int = 0
    unanswered: int = 0
    after: str = ""  # of the requests that came afterwards
    lost: dict[str, int | None] = field(default_factory=dict)  # pages by role; None: it is gone
    knows_s: float | None = None
    free_s: dict[str, float | None] = field(default_factory=dict)  # by role
    notes: list[str] = field(default_factory=list)

    HEAD = (
        "| case | backend | right, wrong, error, no answer | clients know "
        "| pages free (prefill, decode) | pages lost | requests afterwards | |\n"
        "|---|---|---|---|---|---|---|---|"
    )

    def line(self) -> str:
        answers = f"{self.right}, {self.wrong}, {self.errors}, {self.unanswered}"
        free = ", ".join(_seconds(self.free_s[role]) for role in sorted(self.free_s, reverse=True))
        lost = ", ".join(
            "gone" if (pages := self.lost[role]) is None else str(pages)
            for role in sorted(self.lost, reverse=True)
        )
        cells = (self.case, self.backend, answers, _seconds(self.knows_s), free, lost, self.after)
        return "| " + " | ".join((*cells, "; ".join(self.notes))) + " |"

    @property
    def is_harmless(self) -> bool:
        """No wrong token, no lost page, and an answer for every client."""
        return not (
            self.wrong or self.unanswered or any(self.lost.values()) or "wrong" in self.after
        )


def _seconds(value: float | None) -> str:
    return f"not in {PATIENCE_S:g} s" if value is None else f"{value:.1f} s"


@dataclass
class Shape:
    """How a pair is started: words for each server, and prefill's ranks and stages."""

    ranks: dict[str, Any] = field(default_factory=dict)
    prefill_words: tuple[str, ...] = ()
    decode_words: tuple[str, ...] = ()


class Pair:
    """Both servers with one backend, beside a reference."""

    def __init__(
        self,
        backend: str,
        shape: Shape,
        model: Path,
        logs: Path,
        single: Server,
        session: aiohttp.ClientSession,
        rng: random.Random,
        **settings: Any,
    ) -> None:
        self.backend, self.shape, self.model, self.logs = backend, shape, model, logs
        self.single, self.session, self.rng = single, session, rng
        self.settings = settings if backend == "kvflow" else {}
        self.words = ["--max-total-tokens", str(POOL), "--chunked-prefill-size", "256"]
        self.prefill = self.new_prefill(**shape.ranks)
        self.decode = Server(
            "decode",
            model,
            logs,
            *self.words,
            *shape.decode_words,
            name=f"{backend}-decode",
            backend=backend,
            **self.settings,
        )
        self._wanted: dict[tuple[int, ...], list[int]] = {}

    def new_prefill(self, *, at: Server | None = None, **shape: Any) -> Server:
        """A prefill that is not started. `at` is the one whose address it takes."""
        name = f"{self.backend}-prefill{'-replaced' if at else ''}"
        return Server(
            "prefill",
            self.model,
            self.logs,
            *self.words,
            *self.shape.prefill_words,
            name=name,
            backend=self.backend,
            at=at,
            **shape,
            **self.settings,
        )

    @property
    def servers(self) -> dict[str, Server]:
        return {"prefill": self.prefill, "decode": self.decode}

    async def start(self, *servers: Server) -> None:
        await asyncio.to_thread(start_all, servers or self.servers.values())

    async def stop(self, *servers: Server) -> None:
        await asyncio.to_thread(stop_all, servers or self.servers.values())

    def prompts(self, count: int, length: int = LONG) -> list[Prompt]:
        return [random_prompt(self.rng, length) for _ in range(count)]

    # --- requests

    async def in_transfer(self, count: int = 4) -> list[Request]:
        """Long requests, whose pages decode has lent; prefill writes those of at least one."""
        requests = [Request(self, prompt) for prompt in self.prompts(count)]

        async def lent() -> bool:
            load = await load_of(self.session, self.decode)
            return load is not None and load.waiting_for_pages >= count - 1

        await eventually(lent, "decode lends pages")
        return requests

    async def wanted(self, prompt: Prompt, count: int) -> list[int]:
        """What the reference answers."""
        key = (count, *prompt)
        if key not in self._wanted:
            answer = await ask(self.session, self.single.url, prompt, count)
            self._wanted[key] = answer.tokens
        return self._wanted[key]

    async def judge(self, requests: Iterable[Request], row: Row) -> None:
        """Count what clients were answered. One of two legs without an end counts as no answer."""
        for request in requests:
            answer = request.answer("prefill" if request.leg("decode") is None else "decode")
            if not request.ended_at_s.keys() >= request.names:
                row.unanswered += 1
            elif answer is None or answer.status != 200:
                row.errors += 1
                if (text := reason_of(answer)) not in row.notes:
                    row.notes.append(text)
            else:
                same = answer.tokens == await self.wanted(request.prompt, request.count)
                row.right += same
                row.wrong += not same

    async def serve(self, row: Row, count: int = 12) -> None:
        """Requests after the failure, which use the pages of those before."""
        prompts = [*self.prompts(count // 2), *self.prompts(count - count // 2, 300)]
        found = await at_once(4, [partial(self.verdict, prompt) for prompt in prompts])
        counts = {kind: found.count(kind) for kind in ("right", "wrong", "error", "no answer")}
        row.after = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)

    async def verdict(
        self, prompt: Prompt, count: int = COUNT, within_s: float = PATIENCE_S
    ) -> str:
        """Return right, wrong, error or no answer."""
        request = Request(self, prompt, count)
        task = request.legs.decode
        assert task is not None
        await asyncio.wait([task], timeout=within_s)
        if not task.done():
            await leave(request)
            return "no answer"
        if request.legs.prefill is not None:
            await asyncio.wait([request.legs.prefill], timeout=within_s)
        answer = request.answer()
        await leave(request)
        if answer is None or answer.status != 200:
            return "error"
        return "right" if answer.tokens == await self.wanted(prompt, count) else "wrong"

    # --- pages

    async def rests(self, server: Server, since: float, until_s: float) -> float | None:
        """Wait until a server holds nothing, as it said after `since` (time.time), but not longer
        than until `until_s` (time.monotonic). Returns when (time.time).
        """
        while time.monotonic() < until_s:
            load = await load_of(self.session, server)
            if load is not None and load.at >= since and not load.tokens and not load.requests:
                return load.at
            if server.process.poll() is not None:
                return None
            await asyncio.sleep(0.05)
        return None

    async def lost(self, server: Server, since: float) -> int | None:
        """Pages that a server holds though nobody uses it; None if it has ended."""
        if await self.rests(server, since, time.monotonic() + GRACE_S) is not None:
            return 0
        load = await load_of(self.session, server)
        if server.process.poll() is not None or load is None:
            return None
        return -(-load.tokens // PAGE)

    async def watch(
        self, row: Row, requests: Sequence[Request], since_s: float, knows: str = "decode"
    ) -> None:
        """From a failure at `since_s` (time.monotonic): wait for the legs of these requests, and
        until the pages are free; then the clients leave, and what is held now is lost.

        Clients know when the last leg `knows` has ended.
        """
        since = time.time() - (time.monotonic() - since_s)
        until_s = since_s + PATIENCE_S
        tasks = [task for each in requests for name in each.names if (task := each.leg(name))]
        alive = {role: each for role, each in self.servers.items() if each.process.poll() is None}
        _, *free = await asyncio.gather(
            ended(tasks, until_s), *(self.rests(each, since, until_s) for each in alive.values())
        )
        for role, at in zip(alive, free, strict=True):
            row.free_s[role] = None if at is None else max(0.0, at - since)
        if requests and all(knows in each.ended_at_s for each in requests):
            row.knows_s = max(0.0, max(each.ended_at_s[knows] for each in requests) - since_s)
        await self.judge(requests, row)
        await asyncio.gather(*map(leave, requests))
        now = time.time()
        for role, server in self.servers.items():
            row.lost[role] = await self.lost(server, now) if role in alive else None


async def ended(tasks: Sequence[asyncio.Task[Answer]], until_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, until_s - time.monotonic()))


def reason_of(answer: Answer | None) -> str:
    """Why a request failed, without what differs from request to request."""
    if answer is None:
        return "connection broke"
    error = answer.body.get("error", answer.body)
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    text = text.rpartition("with exception ")[2]
    text = re.sub(r"KVTransferError\(bootstrap_room=\d+\): ", "", text)
    return re.sub(r"[\d.:]{4,}", "N", text)[:90].replace("|", "/")


async def leave(request: Request) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await request.legs.leave()


async def kill(server: Server) -> None:
    """All processes of a server, as when its machine ends them."""
    for each in server.find_family():
        with suppress(psutil.NoSuchProcess):
            each.kill()
    await asyncio.to_thread(server.process.wait)


@asynccontextmanager
async def frozen(server: Server) -> AsyncIterator[None]:
    """All processes of a server, which continue afterwards."""
    family = server.find_family()
    try:
        await asyncio.gather(*(freeze(each.pid) for each in family))
        yield
    finally:
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGCONT)
