"""Rooms between pools in device memory, and a fleet on a device beside one on the CPU."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any

import aiohttp
import msgspec
import pytest
import torch

import kvflow
from kvflow.protocols.errors import KvflowError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.serve.demo_model import DEMO_PROMPTS
from kvflow.testing.pair import until
from tests.e2e.fleet import all_home, running
from tests.gpu.test_copies import fill
from tests.memory.kinds import layout_of, names_of, space_of

pytestmark = pytest.mark.gpu
needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="no mooncake"
)
PLANES = ["local", pytest.param("mooncake", marks=needs_mooncake)]
PROMPT = range(16 * 29 + 5)  # 30 pages


def filled(kind: str, seed: int) -> kvflow.PagedPool:
    pool = kvflow.PagedPool.allocate(layout_of(kind, 16, 64, 6, "layer_first"), device="cuda")
    fill(pool, kind, seed)
    return pool


def _bytes_of(layout: PoolLayout) -> int:
    return layout.room_bytes(tuple(12 if space.in_rows else 40 for space in layout.spaces))


@pytest.mark.parametrize("backend", PLANES)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("kind", ["mha", "indexer", "fp8", "hybrid", "windows"])
async def test_a_room_between_devices(kind: str, verify: bool, backend: str) -> None:
    source, target = filled(kind, 1), filled(kind, 100)
    layout = source.layout
    out, into = (
        kvflow.Staging(source, _bytes_of(layout)),
        kvflow.Staging(target),
    )
    async with (
        kvflow.PrefillNode(source, backend, staging=out, verify_transfers=verify) as prefill,
        kvflow.DecodeNode(target, backend, staging=into, verify_transfers=verify) as decode,
    ):
        given = prefill.room(7, prompt=PROMPT)
        taken = await decode.room(7, prefill=[prefill.info], prompt=PROMPT, deadline_s=60)
        await given.matched()
        places = source.places.take_room(layout.wanted(len(PROMPT)), "engine")
        given.send(places[:11])
        given.send(places[11:], last=True, handoff=b"handoff")
        assert await taken.landed() == b"handoff"
        there, here = layout.split(taken.keep("mine")), layout.split(places)
        for name in names_of(kind):
            where, whence = there[space_of(kind, name)], here[space_of(kind, name)]
            found = target.tensor(name).view(torch.uint8)[where.tolist()]
            assert torch.equal(found, source.tensor(name).view(torch.uint8)[whence.tolist()]), name
        await until(lambda: decode.staging_at_rest)
    for staging in (out, into):
        staging.close()


async def test_a_room_that_is_aborted_in_mid_transfer_leaves_nothing_behind() -> None:
    source, target = filled("mha", 1), filled("mha", 100)
    out, into = kvflow.Staging(source), kvflow.Staging(target)
    async with (
        kvflow.PrefillNode(source, "local", staging=out) as prefill,
        kvflow.DecodeNode(target, "local", staging=into) as decode,
    ):
        pages = source.pages.take(30, "engine")
        for number in range(20):
            given = prefill.room(number, prompt=PROMPT)
            taken = await decode.room(number, prefill=[prefill.info], prompt=PROMPT, deadline_s=60)
            await given.matched()
            given.send(pages, last=True)
            await asyncio.sleep(0.0005 * (number % 5))
            taken.close()
            try:
                await given.done()
            except KvflowError:
                await given.released()
            await taken.released()
        assert target.pages.at_rest() and decode.staging_at_rest
    for staging in (out, into):
        staging.close()


async def answers(**changes: Any) -> list[str]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with running(**changes) as fleet, aiohttp.ClientSession(timeout=timeout) as session:

        async def one(n: int) -> str:
            greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
            body = {"text": " ".join(DEMO_PROMPTS[:1] * n), "sampling_params": greedy}
            async with session.post(f"{fleet.url}/generate", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return str(msgspec.json.decode(await answer.read())["text"])

        found = await asyncio.gather(*(one(n) for n in range(1, 9)))
        assert await all_home(session, *(child.url for child in (*fleet.prefills, *fleet.decodes)))
        return found


@pytest.mark.parametrize("backend", PLANES)
async def test_a_fleet_on_a_device_answers_as_one_on_the_cpu(backend: str) -> None:
    """In float32, another order of summation rarely changes the demo model's best token."""
    plain = await answers(device="cpu")
    found = await answers(
        device="cuda", disaggregation_transfer_backend=backend, verify_transfers=True
    )
    assert sum(a == b for a, b in zip(found, plain, strict=True)) >= 7
