"""Services over real nodes, with an engine of the test: waits, and what each leg learns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

import kvflow
from kvflow.handlers.rooms import PrefillRoom
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError, LostError
from kvflow.protocols.limits import Timing
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.serve.http.completion_service import GenerationRequest, ModelCard
from kvflow.serve.http.engine_services import DecodeService
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.registry import registry_app
from kvflow.testing.pair import Pair, pair, small_layout, until
from kvflow.transports.control.registry import RankTable, RegistryClient
from tests.fakes.servers import Server
from tests.fakes.service import Role, body
from tests.serve.http.engine import Engine

CARD = ModelCard(path="m", name="m", context_length=128, vocab_size=100)
PROMPT = list(range(10))
# The rendezvous that is served.
PATIENT = Timing(heartbeat_s=0.02, lost_after_s=60, repeat_after_s=0.02)


@pytest.fixture
async def patient() -> AsyncIterator[Pair]:
    async with pair(timing=PATIENT) as made:
        yield made


def serving(p: Pair) -> tuple[DecodeService, Engine]:
    engine = Engine()
    return DecodeService(CARD, p.decode, engine, 60.0), engine  # type: ignore[arg-type]


async def decoded(service: DecodeService, room: int) -> list[int]:
    prompt = np.array(PROMPT, dtype=np.uint32)
    request = GenerationRequest(
        room=room, prefill="sim", prompt=prompt, params=SamplingParams(max_new_tokens=1)
    )
    return [token.token_id async for token in service.tokens(request)]


async def announced(p: Pair, room: int) -> PrefillRoom:
    """Prefill's half of a room that decode has announced."""
    source = p.prefill.room(room, PROMPT)
    await until(lambda: source.phase is PrefillPhase.ANNOUNCED)
    return source


async def test_a_decode_whose_pool_is_full_for_long_is_waited_for(patient: Pair) -> None:
    p = patient
    service, engine = serving(p)
    asking = asyncio.create_task(decoded(service, 7))
    source = await announced(p, 7)
    for _ in range(15):
        p.clock(p.prefill).advance(1.0)
        p.clock(p.decode).advance(1.0)
        await asyncio.sleep(0)
    assert not source.ended
    engine.free.set()
    await source.matched()
    p.send_all(source, handoff=b"42")
    assert await asking == [42]
    await source.done()
    await p.rest()


async def test_without_a_decode_half_a_room_ends_after_its_rendezvous(patient: Pair) -> None:
    source = patient.prefill.room(7, PROMPT)
    patient.clock(patient.prefill).advance(patient.timing.rendezvous_s - 0.5)
    assert not source.ended
    patient.clock(patient.prefill).advance(0.6)
    with pytest.raises(KvflowError) as caught:
        await source.matched()
    assert caught.value.code is Code.RENDEZVOUS


async def test_a_decode_that_will_have_no_pages_says_so_to_both_legs(patient: Pair) -> None:
    service, engine = serving(patient)
    engine.refusal = CapacityError("free pages", 3, 2)
    asking = asyncio.create_task(decoded(service, 7))
    source = patient.prefill.room(7, PROMPT)
    for waiting in (asking, source.matched()):
        with pytest.raises(KvflowError, match="free pages: asked for 3, limit 2") as caught:
            await waiting
        assert caught.value.code is Code.CAPACITY
    await patient.rest()


@pytest.mark.parametrize("turns", range(6))
async def test_a_promise_that_comes_as_its_client_leaves_is_given_back(
    patient: Pair, turns: int
) -> None:
    service, engine = serving(patient)
    asking = asyncio.create_task(decoded(service, 7))
    await announced(patient, 7)
    engine.free.set()
    for _ in range(turns):  # before, as and after it arrives
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert engine.promised == 0
    await patient.rest()


async def test_a_prefill_that_ends_its_half_ends_the_wait_for_pages(patient: Pair) -> None:
    service, _ = serving(patient)
    asking = asyncio.create_task(decoded(service, 7))
    source = await announced(patient, 7)
    source.close(kvflow.MisuseError("prefill has no place for this prompt").cause())
    with pytest.raises(KvflowError, match="prefill has no place for this prompt"):
        await asking
    await patient.rest()


async def test_a_registry_of_a_thousand_ranks_is_refused_in_words() -> None:
    table = RankTable()
    for rank in range(1024):
        table.put(RankInfo(rank, 1024, 1000 + rank, f"tcp://127.0.0.1:{2 + rank}", "local", ""))
    pool = kvflow.PagedPool.allocate(small_layout(64))
    async with kvflow.DecodeNode(pool, plane="local", resolve=RegistryClient().resolve) as node:
        service = DecodeService(CARD, node, Engine(), 60.0)  # type: ignore[arg-type]
        registry = registry_app(table, RoleMetrics(service.report, role="prefill"))
        async with (
            Server(registry) as found,
            Role(service) as role,  # type: ignore[arg-type]
        ):
            where = {"bootstrap_port": found.port}
            error = await role.refused(502, "/generate", body(text=None, input_ids=PROMPT, **where))
        said = "prefill tcp://127.0.0.1:2 has 1024 ranks; one room takes 64 at most"
        assert (error["code"], error["message"]) == ("protocol_error", said)
        assert not list(node.peers())
        assert pool.pages.at_rest()
    pool.close()


async def test_a_decode_that_does_not_fit_and_refuses_besides_ends_the_other_leg() -> None:
    async with pair(timing=PATIENT, target_layout=small_layout(page_size=8)) as p:
        source = p.prefill.room(7, PROMPT)
        p.decode.refuse(7, "sim", Cause(Code.BAD_REQUEST, "temperature -1 is below 0"))
        with pytest.raises(KvflowError, match="temperature -1 is below 0"):
            await asyncio.wait_for(source.matched(), 20)
        await p.rest()


async def test_a_refusal_for_a_prefill_that_does_not_answer_is_no_internal_error() -> None:
    asked: asyncio.Queue[str] = asyncio.Queue()

    async def resolve(prefill: str) -> Sequence[RankInfo]:
        asked.put_nowait(prefill)
        raise LostError("no answer")

    pool = kvflow.PagedPool.allocate(small_layout(64))
    async with kvflow.DecodeNode(pool, plane="local", resolve=resolve) as node:
        node.refuse(7, "127.0.0.1:1", Cause(Code.BAD_REQUEST, "no"))
        assert await asked.get() == "127.0.0.1:1"
        await until(
            lambda: not any(task.get_name() == "kvflow-refuse-7" for task in asyncio.all_tasks())
        )
    assert node.counts.handler_errors == 0
    pool.close()
