"""Groups of a data-parallel prefill behind decode's routes, over real nodes and a registry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest

from kvflow.handlers.rooms import PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.arguments import TokenIds
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.serve.http.completion_service import ModelCard
from kvflow.serve.http.engine_services import DecodeService
from kvflow.testing.pair import small_layout
from kvflow.transports.control.rank_server import serve_ranks
from kvflow.transports.control.registry import RankTable, RegistryClient
from tests.fakes.servers import Answer
from tests.fakes.service import PROMPTS, Role, body
from tests.serve.http.engine import Engine

CARD = ModelCard(path="m", name="m", context_length=128, vocab_size=100)
PROMPT = [3, 4, 5]


class Groups(NamedTuple):
    """Two groups of one rank each, at one registry, and a decode behind its HTTP routes."""

    prefills: list[PrefillNode]
    decode: DecodeNode
    role: Role
    port: int

    def ask(self, room: int, path: str = "/generate", **more: Any) -> asyncio.Task[Answer]:
        """Decode's leg; it is on its way when this returns."""
        prompt: dict[str, dict[str, Any]] = {
            "/generate": {
                "input_ids": PROMPT,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            },
            "/v1/completions": {"prompt": PROMPT, "max_tokens": 1, "temperature": 0},
            "/v1/chat/completions": {
                "messages": [{"role": "user", "content": "w3 w4 w5"}],
                "max_tokens": 1,
            },
        }
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": room}
        document = {**prompt[path], **where, **more}
        return asyncio.create_task(self.role.call("POST", path, document))

    def wait_at(self, group: int, room: int, prompt: TokenIds = PROMPT) -> PrefillRoom:
        return self.prefills[group].room(room, prompt)

    async def send_from(self, group: int, room: int) -> None:
        """Prefill's leg. The first token is that group's own."""
        owned = self.prefills[group].pool.pages
        pages = owned.take(1, "engine")
        async with self.wait_at(group, room) as half:
            await half.matched()
            half.send(pages, last=True, handoff=str(50 + group).encode())
            await half.done()
        owned.give_back(pages, "engine")


@pytest.fixture
async def groups() -> AsyncIterator[Groups]:
    table = RankTable()
    async with AsyncExitStack() as stack:
        prefills = []
        for number in range(2):
            pool = PagedPool.allocate(small_layout())
            stack.callback(pool.close)
            node = await stack.enter_async_context(
                PrefillNode(pool, "local", dp_rank=number, dp_size=2)
            )
            table.put(node.info)
            prefills.append(node)
        port = await stack.enter_async_context(serve_ranks(table, "127.0.0.1"))
        pool = PagedPool.allocate(small_layout())
        stack.callback(pool.close)
        resolve = RegistryClient().resolve
        decode = await stack.enter_async_context(DecodeNode(pool, "local", resolve=resolve))
        engine: Any = Engine()
        engine.free.set()
        service: Any = DecodeService(CARD, decode, engine, 30.0)
        role = await stack.enter_async_context(Role(service))
        yield Groups(prefills, decode, role, port)
        assert pool.pages.at_rest()
        assert [node.pool.pages.at_rest() for node in prefills] == [True, True]


def token_of(answer: Any) -> str:
    choice = answer["choices"][0] if "choices" in answer else answer
    return str(choice.get("message", choice).get("content") or choice.get("text"))


@pytest.mark.parametrize("path", PROMPTS)
async def test_a_room_is_served_by_its_group_or_by_the_one_that_is_named(
    groups: Groups, path: str
) -> None:
    for room, named, served_by in (
        (4, {}, 0),
        (5, {}, 1),
        (6, {"disagg_prefill_dp_rank": 1}, 1),
        (7, {"disagg_prefill_dp_rank": 0}, 0),
        (8, {"disagg_prefill_dp_rank": None, "routed_dp_rank": 0, "data_parallel_rank": 0}, 0),
    ):
        leg = groups.ask(room, path, **named)
        async with asyncio.timeout(20):
            await groups.send_from(served_by, room)
        answer = await leg
        assert (answer.status, token_of(answer.json)) == (200, f"w{50 + served_by}"), (room, answer)


async def refused(groups: Groups, room: int, *waiting: PrefillRoom, **named: Any) -> Any:
    """Return the error at decode, which the other legs have too."""
    answer = await groups.ask(room, **named)
    assert answer.status == 400, answer
    error = answer.json["error"]
    for leg in waiting:
        with pytest.raises(KvflowError) as seen:
            await leg.matched()
        assert seen.value.code is Code.BAD_REQUEST
        assert error["message"] in str(seen.value)
        leg.close()
    return error


async def test_a_group_that_there_is_not_is_refused_at_every_group(groups: Groups) -> None:
    for room in (10, 12):
        legs = [groups.wait_at(group, room) for group in range(2)]
        error = await refused(groups, room, *legs, disagg_prefill_dp_rank=2)
        assert error["param"] == "disagg_prefill_dp_rank"
        assert error["message"].startswith(
            "disagg_prefill_dp_rank 2 is outside 0..1, the groups of prefill tcp://"
        )
    assert groups.decode.counts.refusals == {"bad_request": 2}


async def told(half: PrefillRoom) -> None:
    with pytest.raises(KvflowError, match="the prompt is too long"):
        await asyncio.wait_for(half.matched(), 20)
    await half.released()


TOO_LONG = Cause(Code.BAD_REQUEST, "the prompt is too long")


@pytest.mark.parametrize(("known", "named"), [(1, None), (1, 1), (2, None), (2, 1)])
async def test_a_refusal_reaches_a_group_that_is_new_to_decode(
    groups: Groups, known: int, named: int | None
) -> None:
    """One that was not there when decode last asked, or that decode has no link to yet."""
    prefill = f"127.0.0.1:{groups.port}"
    groups.decode._ranks[prefill] = [node.info for node in groups.prefills[:known]]
    half = groups.wait_at(1, 7)
    groups.decode.refuse(7, prefill, TOO_LONG, dp_rank=named)
    await told(half)


async def test_a_refusal_reaches_the_groups_that_there_are(groups: Groups) -> None:
    half = groups.wait_at(0, 7)
    groups.decode.refuse(7, [groups.prefills[0].info], TOO_LONG, dp_rank=2)
    await told(half)


@pytest.mark.parametrize("given", [-1, 1 << 40, "1", True, 0.5, [0]])
async def test_what_is_no_rank_is_refused_at_every_group(groups: Groups, given: Any) -> None:
    legs = [groups.wait_at(group, 10) for group in range(2)]
    error = await refused(groups, 10, *legs, disagg_prefill_dp_rank=given)
    assert error["param"] == "disagg_prefill_dp_rank"
    said = f"disagg_prefill_dp_rank: {str(given)!r} is not an integer in 0..1023"
    assert error["message"] == said


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank"])
async def test_another_group_of_decodes_than_this_is_refused(groups: Groups, name: str) -> None:
    leg = groups.wait_at(1, 10)
    error = await refused(groups, 10, leg, **{"disagg_prefill_dp_rank": 1, name: 1})
    assert error["param"] == name
    said = f"{name}: '1' is not an integer in 0..0: this decode is DP rank 0 of 1"
    assert error["message"] == said


@pytest.mark.parametrize("name", ["routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"])
async def test_another_group_of_prefills_than_this_is_refused_and_decode_is_told(
    prefill: Role, name: str
) -> None:
    error = await prefill.refuses("/generate", body(**{name: 1}))
    said = f"{name}: '1' is not an integer in 0..0: this prefill is DP rank 0 of 1"
    assert (error["param"], error["message"]) == (name, said)
