"""What each leg of a request is told that cannot be served, and when: posted by hand, and through
sglang_router.

`python -m tests.e2e.refusals [CASE ...]` prints the table. Prefill waits 30 s for a decode that has
not announced itself, so that a leg which is not told shows; but for a decode that is gone, where
that wait is the bound.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import msgspec
from safetensors.torch import load_file, save_file

from kvflow.serve.config.catalog import flag_of
from kvflow.serve.demo_model import DEMO_MODEL_DIR, DEMO_PROMPTS
from kvflow.serve.launch.child import Child
from tests.e2e.fleet import ask
from tests.e2e.sglang import router_of

START_S, HOLD_S = 120.0, 30.0
TEXT = " ".join(DEMO_PROMPTS) * 4
_rooms = itertools.count(1)


NONE: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """`fault`: what happens to `victim` ("" nothing): "draining", "gone" before the request,
    "killed" during it.
    """

    name: str
    reason: str  # what every leg that lives is told
    prefill: Mapping[str, Any] = NONE
    decode: Mapping[str, Any] = NONE
    victim: str = ""
    fault: str = ""
    limit_s: float = 1.0


BRIEF: Mapping[str, Any] = {"rendezvous_s": 1.0}
SLOW: Mapping[str, Any] = {"transfer_rate_limit": 1 << 17}
# Hundred and some.
POOL_TOO_SMALL = (
    "prompt tokens in the KV pool (--num-pages, --pool-bytes, --mem-fraction): asked for 3"
)
CASES = (
    Case("decode's pool too small", POOL_TOO_SMALL, decode={"num_pages": 8}),
    Case("page size", "page_size: prefill 16, decode 24", decode={"page_size": 24}),
    Case("dtype", "k dtype: prefill float32, decode bfloat16", decode={"dtype": "bfloat16"}),
    Case("model", "model fingerprint: prefill 'LlamaForCausalLM", decode={"model_path": "another"}),
    Case(
        "data plane",
        "data planes differ: prefill local, decode mooncake",
        decode={"disaggregation_transfer_backend": "mooncake"},
    ),
    Case("prefill's pool too small", POOL_TOO_SMALL, prefill={"num_pages": 8}),
    Case("decode draining", "shutting down", victim="decode", fault="draining"),
    Case("prefill draining", "shutting down", victim="prefill", fault="draining"),
    Case("decode gone", "nothing more came for 1", BRIEF, NONE, "decode", "gone", 2.0),
    Case("prefill gone", "onnect", victim="prefill", fault="gone"),
    Case("decode killed", "died", {**SLOW, **BRIEF}, NONE, "decode", "killed", 2.0),
    Case("prefill killed", "died", SLOW, NONE, "prefill", "killed"),
)


class Row(NamedTuple):
    """One leg's answer; `attempts` are the router's."""

    case: str
    leg: str
    status: int
    code: str
    text: str
    seconds: float
    attempts: int = 1

    def __str__(self) -> str:
        tries = f" ({self.attempts} attempts)" if self.leg == "client" else ""
        return (
            f"{self.case:<26} {self.leg:<8} {self.status} {self.code:<16} {self.seconds:6.2f} "
            f"s{tries}  {self.text}"
        )


class Answer(NamedTuple):
    status: int
    code: str
    text: str
    at_s: float


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    try:
        async with session.post(f"{url}/generate", json=body) as answer:
            raw = await answer.read()
    except aiohttp.ClientError as error:
        return Answer(0, type(error).__name__, str(error), monotonic())
    at_s = monotonic()
    with suppress(msgspec.DecodeError, KeyError, TypeError):
        told = msgspec.json.decode(raw)["error"]
        return Answer(answer.status, str(told["code"]), str(told["message"]), at_s)
    return Answer(answer.status, "-", raw.decode(errors="replace")[:200], at_s)


class Roles:
    """One prefill and one decode of a case."""

    def __init__(
        self, case: Case, prefill: Child, decode: Child, session: aiohttp.ClientSession
    ) -> None:
        self.case, self.prefill, self.decode, self.session = case, prefill, decode, session
        self._held: list[asyncio.Task[Answer]] = []

    @property
    def victim(self) -> Child:
        return self.prefill if self.case.victim == "prefill" else self.decode

    def body(self, **changes: Any) -> dict[str, Any]:
        return {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}, **changes}

    def legs(self, **changes: Any) -> dict[str, asyncio.Task[Answer]]:
        """Both legs of one request, as a router posts them."""
        port = self.prefill.bootstrap_port
        body = self.body(
            bootstrap_host="127.0.0.1", bootstrap_port=port, bootstrap_room=next(_rooms), **changes
        )
        children = {"prefill": self.prefill, "decode": self.decode}
        return {
            leg: asyncio.create_task(post(self.session, child.url, body))
            for leg, child in children.items()
        }

    async def inject_fault(self) -> None:
        """What happens before the request."""
        if self.case.fault == "gone":
            self.victim.process.kill()
            await self.victim.process.wait()
        elif self.case.fault == "draining" and not self._held:
            if self.case.victim == "decode":  # a request that runs for long keeps it from ending
                long = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
                self._held = list(self.legs(sampling_params=long).values())
            else:
                room = self.body(bootstrap_host="127.0.0.1", bootstrap_room=next(_rooms))
                self._held = [asyncio.create_task(post(self.session, self.prefill.url, room))]
            busy = "rooms" if self.case.victim == "prefill" else "running"
            async with asyncio.timeout(START_S):
                while not (await ask(self.session, f"{self.victim.url}/server_info"))[busy]:
                    await asyncio.sleep(0.01)
            self.victim.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(START_S):
                while (await self._health()) == 200:
                    await asyncio.sleep(0.01)

    async def killed(self) -> float:
        """When the victim was killed, in the middle of a transfer."""
        async with asyncio.timeout(START_S):
            while (
                "transferring"
                not in (await ask(self.session, f"{self.prefill.url}/server_info"))["rooms"]
            ):
                await asyncio.sleep(0.01)
        self.victim.process.kill()
        return monotonic()

    async def attempts(self) -> int:
        """Requests that the living role has answered."""
        child = self.prefill if self.victim is self.decode else self.decode
        async with self.session.get(f"{child.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return int(
            sum(
                float(ln.split()[-1])
                for ln in lines
                if "requests_total{" in ln and '"/generate"' in ln
            )
        )

    async def _health(self) -> int:
        async with self.session.get(f"{self.victim.url}/health") as answer:
            return answer.status

    async def stop(self) -> None:
        for child in (self.prefill, self.decode):
            child.kill()
        for task in self._held:
            await task
        for child in (self.prefill, self.decode):
            await child.stop(1.0)


@asynccontextmanager
async def roles_of(
    case: Case, session: aiohttp.ClientSession, other_model: Path
) -> AsyncIterator[Roles]:
    common = {
        "model_path": str(DEMO_MODEL_DIR),
        "num_pages": 512,
        "dtype": "float32",
        "drain_timeout_s": 60,
        "port": 0,
    }
    own = {"disaggregation_bootstrap_port": 0, "rendezvous_s": HOLD_S}
    settings = {"prefill": {**common, **own, **case.prefill}, "decode": {**common, **case.decode}}
    if "model_path" in case.decode:
        settings["decode"]["model_path"] = str(other_model)
    children = [
        Child(
            role,
            role,
            [word for name, value in given.items() for word in (flag_of(name), str(value))],
            quiet=True,
        )
        for role, given in settings.items()
    ]
    roles = Roles(case, children[0], children[1], session)
    try:
        await asyncio.gather(*(child.start(os.environ, START_S) for child in children))
        yield roles
    finally:
        await roles.stop()


async def by_hand(roles: Roles) -> list[Row]:
    since = monotonic()
    legs = roles.legs()
    if roles.case.fault == "killed":
        since = await roles.killed()
    rows = []
    for leg, task in legs.items():
        answer = await task
        rows.append(
            Row(roles.case.name, leg, answer.status, answer.code, answer.text, answer.at_s - since)
        )
    return rows


@asynccontextmanager
async def router_to(roles: Roles) -> AsyncIterator[str]:
    """A router tries its pair once while it starts; what happens, happens after that."""
    port = roles.prefill.bootstrap_port
    assert port is not None
    async with router_of(roles.prefill.url, port, roles.decode.url, served=False) as url:
        yield url


async def through(url: str, roles: Roles) -> list[Row]:
    before, since = await roles.attempts(), monotonic()
    asking = asyncio.create_task(post(roles.session, url, roles.body()))
    if roles.case.fault == "killed":
        since = await roles.killed()
    answer = await asking
    attempts = await roles.attempts() - before
    return [
        Row(
            roles.case.name,
            "client",
            answer.status,
            answer.code,
            answer.text,
            answer.at_s - since,
            attempts,
        )
    ]


def make_other_model(directory: Path) -> Path:
    """The demo model, trained a little further."""
    path = Path(shutil.copytree(DEMO_MODEL_DIR, directory / "another"))
    weights = load_file(path / "model.safetensors")
    moved = {name: weight * 1.01 for name, weight in weights.items()}
    save_file(moved, path / "model.safetensors", {"format": "pt"})
    return path


async def rows_of(case: Case, other_model: Path) -> list[Row]:
    """By hand and through the router; fresh roles for each where one of them does not live through
    the case.
    """
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)
    ) as session:
        async with roles_of(case, session, other_model) as roles:
            if case.fault in ("draining", "killed"):
                await roles.inject_fault()
                rows = await by_hand(roles)
            else:
                async with router_to(roles) as url:
                    await roles.inject_fault()
                    return await by_hand(roles) + await through(url, roles)
        async with roles_of(case, session, other_model) as roles, router_to(roles) as url:
            await roles.inject_fault()
            return rows + await through(url, roles)


async def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        other = make_other_model(Path(directory))
        for case in CASES:
            if not names or case.name in names:
                for row in await rows_of(case, other):
                    sys.stdout.write(f"{row}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
