"""`kvflow up --l3 mooncake`: its master's life, and what the death of it costs who is served."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from typing import Any

import aiohttp
import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.guarded import Limits
from kvflow.serve.launch import mooncake_master
from kvflow.serve.launch.mooncake_master import MooncakeMaster
from kvflow.serve.launch.supervisor import Fleet
from tests.e2e.fleet import all_home, running
from tests.e2e.test_prefix import Turn, cache_of, say

PAGE_SIZE, TOKENS = 16, 8
UNDER_WAY = 2 * Limits().threads + 1  # puts, gets and a lookup that a store's threads have at once
_MASTER = """
import asyncio
from kvflow.serve.launch.mooncake_master import MooncakeMaster

async def main():
    master = MooncakeMaster()
    await master.start()
    print(master.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def ends(pid: int) -> None:
    """Return when the process has ended."""
    try:
        descriptor, ended = os.pidfd_open(pid), asyncio.Event()
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def another(master: MooncakeMaster, pid: int) -> None:
    """Return when it runs again."""
    async with asyncio.timeout(20):
        while True:
            if master.pid != pid:
                try:
                    _, writer = await asyncio.open_connection(*master.address.split(":"))
                    writer.close()
                    return
                except OSError:
                    pass
            await asyncio.sleep(0.02)


async def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_master, "NAME", "no_such_master")
    with pytest.raises(
        MisuseError, match=r"there is no no_such_master: pip install 'kvflow\[mooncake\]'"
    ):
        await MooncakeMaster().start()


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_the_master_comes_back_and_leaves_with_who_has_started_it() -> None:
    pytest.importorskip("mooncake")
    master = MooncakeMaster()
    await master.start()
    address, pid = master.address, master.pid
    os.kill(pid, signal.SIGKILL)
    await another(master, pid)
    assert master.address == address
    pid = master.pid
    await master.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _MASTER, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await ends(pid)


class Users:
    """Prompts that begin alike. Whenever one is asked again its answer is the first one."""

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet, seed: int) -> None:
        self._session, self._fleet, self._dice = session, fleet, random.Random(seed)
        self._system = self._words(64)
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self.prompts: list[list[int]] = []

    def _words(self, count: int) -> list[int]:
        return [self._dice.randrange(10, 900) for _ in range(count)]

    def new_prompts(self, count: int) -> list[list[int]]:
        made = [self._system + self._words(40) for _ in range(count)]
        self.prompts += made
        return made

    async def ask(self, prompts: list[list[int]]) -> list[Turn]:
        turns = [await say(self._session, self._fleet.url, prompt, TOKENS) for prompt in prompts]
        for prompt, turn in zip(prompts, turns, strict=True):
            assert turn.tokens == self._expected.setdefault(tuple(prompt), turn.tokens)
        return turns

    async def stores(self) -> list[Any]:
        children = (*self._fleet.prefills, *self._fleet.decodes)
        return [await cache_of(self._session, child.url) for child in children]

    async def until_stores(self, condition: Any) -> list[Any]:
        async with asyncio.timeout(40):
            while not condition(found := await self.stores()):
                await asyncio.sleep(0.02)
        return found

    async def forget(self) -> None:
        """What is cached on devices and hosts; not in the store."""
        for child in (*self._fleet.prefills, *self._fleet.decodes):
            async with self._session.post(f"{child.url}/flush_cache") as answer:
                assert answer.status == 200


@pytest.mark.slow
@pytest.mark.xdist_group("fleets")
async def test_serving_goes_on_without_the_store_and_with_it_when_it_is_back(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mooncake")
    # It is back when the test has been served without it, however long that takes.
    may_start, launch = asyncio.Event(), MooncakeMaster._launch
    may_start.set()

    async def launched(master: MooncakeMaster, ports: tuple[int, int]) -> None:
        await may_start.wait()
        await launch(master, ports)

    monkeypatch.setattr(MooncakeMaster, "_launch", launched)
    tier = {
        "prefix_cache": "lru",
        "page_size": PAGE_SIZE,
        "cache_host_bytes": 1 << 24,
        "l3": "mooncake",
    }
    async with (
        running(**tier, mooncake_global_segment_size=1 << 26) as fleet,
        aiohttp.ClientSession() as session,
    ):
        assert fleet.store is not None
        users = Users(session, fleet, seed)
        users.new_prompts(4)

        async def stored() -> bool:
            """What was not stored, the store being busy, is with the next request for it."""
            await users.ask(users.prompts)
            return all(cache["stored_pages"] >= 4 + 4 * 2 for cache in await users.stores())

        async with asyncio.timeout(40):
            while not await stored():
                pass

        async def read_back() -> bool:
            """What a busy machine has not read in time is computed instead."""
            await users.forget()
            turns = await users.ask(users.prompts)
            print("read back from the store:", [turn.cached_tokens for turn in turns])
            return all(turn.cached_tokens == 96 for turn in turns) and all(
                cache["fetched_pages"] >= 12 for cache in await users.stores()
            )

        async with asyncio.timeout(40):
            while not await read_back():
                pass
        await users.forget()

        before = [cache["storage"] for cache in await users.stores()]
        pid, killed_s = fleet.store.pid, time.monotonic()
        may_start.clear()
        os.kill(pid, signal.SIGKILL)
        await users.ask(users.prompts)
        dead = await users.until_stores(
            lambda caches: not any(c["storage"]["readable"] for c in caches)
        )
        await users.ask(users.new_prompts(4))
        # The calls under way when the store died may all wait for it. Those that come later do not.
        for cache, was in zip(await users.stores(), before, strict=True):
            assert cache["storage"]["stalls"] - was["stalls"] <= UNDER_WAY, cache["storage"]
        async with session.get(f"{fleet.prefills[0].url}/metrics") as answer:
            metrics = await answer.text()
        print(f"without a master, {time.monotonic() - killed_s:.1f} s after its death:", dead)
        assert (
            "kvflow_cache_storage_readable 0.0" in metrics
            and "kvflow_cache_storage_trips_total" in metrics
        )

        may_start.set()
        await another(fleet.store, pid)
        back = await users.until_stores(
            lambda caches: all(c["storage"]["readable"] for c in caches)
        )
        await users.until_stores(lambda caches: all(c["storage"]["writable"] for c in caches))
        before = [cache["stored_pages"] for cache in back]

        async def stored_again() -> bool:
            """There is no room before the workers have lent theirs again."""
            await users.ask(users.new_prompts(1))
            return all(
                c["stored_pages"] >= n + 4
                for c, n in zip(await users.stores(), before, strict=True)
            )

        async with asyncio.timeout(40):
            while not await stored_again():
                pass
        await users.forget()
        fetched = [cache["fetched_pages"] for cache in await users.stores()]
        await users.ask(users.prompts)
        healed = await users.stores()
        assert all(cache["fetched_pages"] > n for cache, n in zip(healed, fetched, strict=True))
        print("again:", healed)
        assert await all_home(session, *(child.url for child in (*fleet.prefills, *fleet.decodes)))
