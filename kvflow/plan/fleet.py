"""A real fleet, and clients that play requests on it."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from kvflow.plan.profile import Sizes
from kvflow.plan.simulate import Outcome
from kvflow.plan.trace import Request, Trace
from kvflow.protocols.errors import KvflowError, MisuseError
from kvflow.serve.config.catalog import ALIASES, CANONICAL, FIELDS_OF_ROLE, env_of, flag_of
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.launch.supervisor import Fleet

# Ids of prompts stay below this, so that they are in the vocabulary of any model.
_VOCABULARY = 256
_FIRST_ID = 3
# Prompts that warm a fleet up, and a salt that no trace and no measurement has.
_WARMING = 4
_WARMING_SALT = 1 << 40


class CpuTime(NamedTuple):
    """How long a thread ran, and waited for a CPU."""

    ran_s: float
    waited_s: float


CpuTimes = Mapping[tuple[str, int], CpuTime]
"""By role and thread id."""


class Fleets:
    """Starts `kvflow up` with the flags of a user."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Raises: MisuseError for flags that `kvflow up` does not have, a key and HTTPS."""
        given = _given(flags)
        given.setdefault("model_path", str(DEMO_MODEL_DIR))
        self._given = {**given, "port": "0", "log_level": "warning", "access_log": False}
        self.settings: Settings = resolve("up", self._given)
        # The clients below send no key and speak plain HTTP, which would fail after the start.
        for name in ("api_key", "tls_cert"):
            if getattr(self.settings, name):
                raise MisuseError(
                    f"{flag_of(name)} or {env_of(name)}: plan asks its fleet without a key, by "
                    "plain HTTP; leave it out"
                )

    @asynccontextmanager
    async def started(self, prefills: int = 1, decodes: int = 1) -> AsyncIterator[Started]:
        """Run a fleet, which ends with the block. Raises: KvflowError if it cannot start."""
        given = self._given | {"prefill_workers": prefills, "decode_workers": decodes}
        async with (
            Fleet(resolve("up", given), given, quiet=True) as fleet,
            aiohttp.ClientSession() as session,
        ):
            infos: list[dict[str, Any]] = []
            for child in (*fleet.prefills, *fleet.decodes):
                async with session.get(f"{child.url}/server_info") as answer:
                    infos.append(await answer.json())
            pids = [(child.role, child.process.pid) for child in fleet.children]
            yield Started(fleet.url, self.settings, infos[:prefills], infos[prefills:], pids)


def _given(flags: Sequence[str]) -> dict[str, Any]:
    """Return the settings that flags of the form `--name value` or `--name=value` give."""
    found: dict[str, Any] = {}
    rest = list(flags)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        spelt = name.removeprefix("--").replace("-", "_")
        key = CANONICAL.get(spelt, spelt)
        known = name.startswith("--") and (key in FIELDS_OF_ROLE["up"] or key in ALIASES)
        if not known or (not has_value and not rest):
            raise MisuseError(f"{name}: after --, plan takes flags of `kvflow up` with a value")
        found[key] = value if has_value else rest.pop(0)
    return found


class Started:
    """A running fleet: the router's URL, and what its workers say of themselves."""

    def __init__(
        self,
        url: str,
        settings: Settings,
        prefills: Sequence[dict[str, Any]],
        decodes: Sequence[dict[str, Any]],
        pids: Sequence[tuple[str, int]],
    ) -> None:
        self.url, self._settings = url, settings
        self._prefills, self._decodes, self._pids = prefills, decodes, pids

    @property
    def about(self) -> dict[str, Any]:
        return self._decodes[0]

    @property
    def sizes(self) -> Sizes:
        settings, workers = self._settings, (*self._prefills, *self._decodes)
        return Sizes(
            prefill_pool=min(one["pool"]["tokens"] for one in self._prefills),
            decode_pool=min(one["pool"]["tokens"] for one in self._decodes),
            page_size=self.about["page_size"],
            token_bytes=self.about["pool"]["page_bytes"] // self.about["page_size"],
            max_model_len=min(one["max_model_len"] for one in workers),
            chunk_tokens=settings.chunked_prefill_size,
            batch_tokens=settings.max_batch_tokens,
            max_running=settings.max_running_requests,
            new_token_ratio=settings.new_token_ratio,
        )

    def cpu_times(self, before: CpuTimes | None = None) -> CpuTimes:
        """Return how long each thread of the roles ran and waited, since `before`."""
        found: dict[tuple[str, int], CpuTime] = {}
        for role, pid in self._pids:
            for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with suppress(OSError):  # a thread that has just ended
                    ran, waited, _ = map(int, path.read_text().split())
                    key = role, int(path.parent.name)
                    old = (before or {}).get(key, CpuTime(0, 0))
                    found[key] = CpuTime(ran / 1e9 - old.ran_s, waited / 1e9 - old.waited_s)
        return found

    async def ask(self, ids: Sequence[int], new_tokens: int) -> Played:
        """Stream one completion. Raises: KvflowError if it is not answered to its end."""
        url = urlsplit(self.url)
        body = json.dumps(
            {
                "prompt": list(ids),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        played = Played(time.perf_counter())
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(head.encode() + body)
            # Answers are only stored now: a client's own work would take time from the fleet.
            while piece := await reader.read(1 << 16):
                played.pieces.append((time.perf_counter(), piece))
        finally:
            writer.close()
        return played.checked()


def slowed_by(times: CpuTimes, role: str, workers: int) -> float:
    """Return how many times as long the steps of a role took because they waited for a CPU.

    Only the busiest thread of each worker counts, in which its model runs: many waits of the others
    delay nothing.
    """
    every = sorted((time for (of, _), time in times.items() if of == role), reverse=True)
    busiest = every[:workers]
    ran_s = sum(time.ran_s for time in busiest)
    return 1 + sum(time.waited_s for time in busiest) / max(ran_s, 1e-9)


class Played:
    """One answer as it arrived."""

    def __init__(self, began_at_s: float) -> None:
        self.began_at_s = began_at_s
        self.pieces: list[tuple[float, bytes]] = []
        self.cached_tokens = 0

    def checked(self) -> Played:
        """Return the answer if it is whole. Raises: KvflowError."""
        whole = b"".join(piece for _, piece in self.pieces)
        if b" 200 " not in whole[:16] or b"data: [DONE]" not in whole:
            raise KvflowError(f"the fleet did not answer a request: {whole[-400:]!r}")
        _, _, rest = whole.partition(b'"cached_tokens":')
        digits = rest[:12].lstrip().split(b"}")[0].split(b",")[0]
        self.cached_tokens = int(digits) if digits.isdigit() else 0
        return self

    @property
    def token_times_s(self) -> list[float]:
        """Times of the pieces with tokens."""
        return [at for at, piece in self.pieces if b"data: {" in piece]

    @property
    def first_s(self) -> float:
        return self.token_times_s[0] - self.began_at_s

    @property
    def end_s(self) -> float:
        return self.pieces[-1][0] - self.began_at_s


def prompt_of(request: Request, block_tokens: int, salt: int = 0) -> list[int]:
    """Return token ids for a request. Equal blocks have equal ids, and others differ."""
    blocks = [
        np.random.default_rng((salt, block)).integers(_FIRST_ID, _VOCABULARY, block_tokens)
        for block in request.blocks
    ]
    found: list[int] = np.concatenate(blocks)[: request.prompt_tokens].tolist()
    return found


async def warm_up(fleet: Started) -> None:
    """Let the workers meet and compute a whole step, before anything is timed.

    Raises: KvflowError if the fleet does not answer.
    """
    sizes = fleet.sizes
    tokens = max(
        1, min(sizes.chunk_tokens, sizes.max_model_len // 2, sizes.prefill_pool // _WARMING)
    )
    prompts = [
        prompt_of(Request(0, tokens, _WARMING, (number,)), tokens, _WARMING_SALT)
        for number in range(_WARMING)
    ]
    await asyncio.gather(*(fleet.ask(ids, _WARMING) for ids in prompts))


async def play(fleet: Started, trace: Trace, most_s: float) -> list[Outcome]:
    """Play a trace on a fleet, at its times of arrival.

    Raises: KvflowError if an answer fails, TimeoutError after `most_s`.
    """
    prompts = [prompt_of(one, trace.block_tokens) for one in trace.requests]
    begun_s = time.perf_counter()

    async def one(request: Request, ids: list[int]) -> Outcome:
        played = await fleet.ask(ids, request.new_tokens)
        # A loop may wake up to a millisecond early.
        late_s = max(0.0, played.began_at_s - begun_s - request.at_s)
        return Outcome(
            request, played.first_s + late_s, played.end_s + late_s, played.cached_tokens
        )

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.timeout(most_s), asyncio.TaskGroup() as group:
        pairs = zip(trace.requests, prompts, strict=True)
        # Tasks that each slept until their time would not keep the order of a group.
        for at_s, some in itertools.groupby(pairs, key=lambda pair: pair[0].at_s):
            await asyncio.sleep(begun_s + at_s - time.perf_counter())
            tasks += [group.create_task(one(request, ids)) for request, ids in some]
    return [task.result() for task in tasks]
