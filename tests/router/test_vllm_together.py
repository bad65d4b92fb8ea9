"""A router that asks prefill and decode with kvflow's vLLM connector at once; and joining vLLMs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
import pytest

from kvflow.connectors.vllm.params import FromPrefill, ToDecode, read_params
from kvflow.http.authorization import Keys
from kvflow.router.vllm_engine import _Address
from tests.fakes.servers import Front
from tests.fakes.service import Role
from tests.fakes.vllm import COMPLETIONS, REQUESTS, ROOM_OF_PREFILL, FakeVllm, ask, fleet


def pair() -> tuple[FakeVllm, FakeVllm]:
    rooms: dict[int, asyncio.Event] = {}
    return FakeVllm("kvflow", rooms), FakeVllm("kvflow", rooms)


class Together:
    """A pair behind a router that has served one request, and so knows where to find prefill."""

    def __init__(self, front: Front, p: FakeVllm, d: FakeVllm) -> None:
        self.front, self.p, self.d = front, p, d

    def one_by_one(self) -> list[bool]:
        return ["remote_engine_id" in params for params in self.p.params]

    async def asking(self) -> asyncio.Task[Any]:
        """A further request that both have, and that waits for prefill."""
        self.p.gate.clear()
        for fake in (self.p, self.d):
            fake.started.clear()
        task = asyncio.create_task(ask(self.front, stream=True))
        for fake in (self.p, self.d):
            await asyncio.wait_for(fake.started.wait(), 20)
        return task


@pytest.fixture
async def both() -> AsyncIterator[Together]:
    p, d = pair()
    async with fleet([p], [d], "together") as front:
        await ask(front)
        yield Together(front, p, d)


async def test_the_first_request_tells_where_decodes_find_a_prefill(both: Together) -> None:
    for stream in (True, False):
        await ask(both.front, stream=stream)
    p, d = both.p, both.d
    assert p.params[0]["remote_engine_id"] is None and d.params[0]["kvflow_room"] == ROOM_OF_PREFILL
    for first, second in zip(p.params[1:], d.params[1:], strict=True):
        room = first["kvflow_room"]
        assert first == {"do_remote_decode": True, "do_remote_prefill": False, "kvflow_room": room}
        assert second == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvflow_room": room,
            "remote_host": "10.0.0.7",
            "remote_port": 5600,
            "kvflow_decode_workers": 2,
        }
        assert 1 <= room <= (1 << 53) - 1
    assert p.params[1] != p.params[2], "each request has its own room"
    assert [body["max_tokens"] for body in p.bodies + d.bodies] == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("legs", ["sequential", "together"])
async def test_the_connector_reads_what_the_router_writes(
    legs: Literal["sequential", "together"],
) -> None:
    """In both orders of the legs; and the router reads what the connector answers."""
    p, d = pair()
    async with fleet([p], [d], legs) as front:
        for _ in range(2):
            await ask(front)
    for n, (first, second) in enumerate(zip(p.params, d.params, strict=True)):
        is_named = legs == "together" and n > 0
        room = first["kvflow_room"] if is_named else ROOM_OF_PREFILL
        assert read_params(first) == ToDecode(room if is_named else None)
        expected = FromPrefill(room, "10.0.0.7", 5600, 2, is_computed=not is_named)
        assert read_params(second) == expected


async def test_decode_is_asked_while_prefill_computes(both: Together) -> None:
    asking = await both.asking()
    assert len(both.p.bodies) == len(both.d.bodies) == 2 and not asking.done()
    both.p.gate.set()
    await asyncio.wait_for(asking, 20)


async def test_a_client_that_leaves_ends_both_legs(both: Together) -> None:
    asking = await both.asking()
    asking.cancel()
    for fake in (both.p, both.d):
        await asyncio.wait_for(fake.aborted.get(), 20)
    both.p.gate.set()
    await ask(both.front)
    assert both.one_by_one() == [True, False, False], "it was no fault of prefill's"


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_after_a_failure_the_same_pair_is_asked_one_by_one(
    both: Together, failing: str, status: int
) -> None:
    (both.p if failing == "prefill" else both.d).failures.append(status)
    for _ in range(2):
        await ask(both.front)
    assert both.one_by_one() == [True, False, True, False]


async def test_several_engines_behind_one_url_are_asked_one_by_one(both: Together) -> None:
    """A data-parallel vLLM: each of its engines has its own registry, and any may get a request."""
    both.p.failures.append(500)
    both.p.connector_port = 5700
    for _ in range(3):
        await ask(both.front)
    assert both.one_by_one() == [True, False, True, True, True]
    both.front.worker(both.p).mark_lost("reset", 0.0)
    for _ in range(2):
        await ask(both.front)
    assert not both.one_by_one()[-1] and both.d.params[-1]["remote_port"] == 5700


async def test_what_vllm_refuses_is_no_failure_of_the_pair(both: Together) -> None:
    await both.front.refused(404, COMPLETIONS, REQUESTS[COMPLETIONS] | {"model": "other"})
    await ask(both.front)
    assert both.one_by_one() == [True, False, False]


@pytest.mark.parametrize("connector", ["nixl", ""])
async def test_other_connectors_are_asked_one_by_one(connector: Any) -> None:
    p, d = FakeVllm(connector), FakeVllm(connector)
    async with fleet([p], [d], "together") as front:
        for _ in range(3):
            await ask(front)
    assert all("kvflow_room" not in (params or {}) for params in p.params + d.params)


async def test_a_vllm_joins_as_what_its_operator_says() -> None:
    p, d, late = FakeVllm(), FakeVllm(), FakeVllm()
    async with late, fleet([p], [d], keys=Keys(admin="key")) as front:
        assert await front.turned_away(400, late) == (
            "worker_type: give prefill or decode: a vLLM server does not say which of them it is"
        )
        accepted = await front.join(late, worker_type="prefill")
        assert accepted["message"] == "it gets requests"
        front.router.membership.leave(front.worker(p))
        await ask(front)
        assert (len(p.bodies), len(late.bodies)) == (0, 1)
        assert front.worker(late).role == "prefill"


async def test_a_server_that_may_not_join(decode: Role) -> None:
    p, d, other = FakeVllm(), FakeVllm(), FakeVllm()
    other.model = "another"
    async with other, fleet([p], [d], keys=Keys(admin="key")) as front:
        for worker, status, said in (
            (other, 409, "another model"),
            (decode, 502, "/version answered 404: it is not a vLLM server"),
        ):
            assert said in await front.turned_away(status, worker, worker_type="decode")


async def test_a_leaving_prefill_stays_until_decode_has_its_pages() -> None:
    """Decode may read from it until it has answered."""
    p, d = FakeVllm(), FakeVllm()
    d.gate.clear()
    async with fleet([p], [d]) as front:
        asking = asyncio.create_task(ask(front))
        await asyncio.wait_for(d.started.wait(), 20)
        worker = front.worker(p)
        front.router.membership.leave(worker)
        assert worker in front.router.workers.all
        d.gate.set()
        await asyncio.wait_for(asking, 20)
        assert worker not in front.router.workers.all


@pytest.mark.parametrize(
    "params",
    [
        b"null",
        b"[]",
        b'{"remote_host":"h"}',
        b'{"remote_host":"\xff"}',
        b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=["null", "a list", "no port", "no text", "nested"],
)
def test_what_names_no_prefill_with_our_connector_is_no_address(params: bytes) -> None:
    assert _Address.read(msgspec.Raw(params)) is None
