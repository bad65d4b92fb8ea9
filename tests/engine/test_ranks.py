"""Two stages of one model in one process, over real sockets, nodes and rooms: their steps, and how requests end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
import torch

from kvflow.engine.model.load import LoadedModel, load_model
from kvflow.engine.model.parallel.part import Meeting, ModelPart
from kvflow.engine.model.step import Row
from kvflow.engine.ranks import wire
from kvflow.engine.ranks.following import StepFollower
from kvflow.engine.ranks.group import PrefillGroup
from kvflow.engine.ranks.leading import StepLeader
from kvflow.engine.scheduler.decode import DecodeEngine
from kvflow.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.engine.scheduler.prefill import PrefillEngine
from kvflow.engine.scheduler.prefill_steps import PrefillSteps
from kvflow.handlers.group import LeaderShell, MemberShell, OpenRoom
from kvflow.handlers.rooms import PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.arguments import check_prompt
from kvflow.protocols.errors import CapacityError, Cause, Code, KvflowError, MisuseError, RefusedError, WireError
from kvflow.protocols.group_leader import GroupLeader
from kvflow.protocols.group_member import GroupMember, TicketKey
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.messages import Incarnation, Rank, RoomId
from kvflow.telemetry.counters import Counts
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.host.identity import wait_dead
from tests.engine import tiny_models
from tests.engine.pair import greedy, prompt_of, until

STAGES, PAGE_SIZE, PAGES = 2, 4, 64
HERE = "127.0.0.1"


@pytest.fixture
def stages(tiny: Callable[[str], Path]) -> Iterator[list[LoadedModel]]:
    """Both stages of the tiny llama, with a way of hidden states between them, which knows no generation yet."""
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(STAGES) as threads:
        meeting = Meeting(Path(directory))
        path, parts = str(tiny("llama")), [ModelPart(stage, STAGES) for stage in range(STAGES)]
        loads = [threads.submit(load_model, path, part=part, meeting=meeting) for part in parts]
        found = [load.result(60) for load in loads]
        yield found
        for model in found:
            model.neighbours.close()


class Stages:
    """A prefill of two ranks, and a decode."""

    def __init__(self, models: list[LoadedModel], whole: LoadedModel, stack: AsyncExitStack) -> None:
        self.models, self.whole, self._stack = models, whole, stack
        self.nodes = [self._node(rank) for rank in range(STAGES)]
        self.threads = [ThreadPoolExecutor(1) for _ in range(STAGES + 1)]
        self.members: list[MemberShell] = []
        self.broken: list[str] = []
        layout = build_layout(whole.streams, page_size=PAGE_SIZE, num_pages=PAGES, fingerprint=whole.fingerprint)
        self.target = PagedPool.allocate(layout, shared=True)
        stack.callback(self.target.close)
        self.decode = DecodeNode(self.target, "local")
        self.decode_engine = DecodeEngine(whole, self.target, self.target.pages, self.threads[STAGES])
        self.rooms = iter(range(1, 1000))

    def _node(self, rank: int) -> PrefillNode:
        model = self.models[rank]
        layout = build_layout(model.streams, page_size=PAGE_SIZE, num_pages=PAGES, fingerprint=model.fingerprint)
        pool = PagedPool.allocate(layout, shared=False)
        self._stack.callback(pool.close)
        return PrefillNode(pool, "local", rank=rank, world_size=STAGES)

    async def start(self, **options: int) -> None:
        nodes: list[PrefillNode | DecodeNode] = [*self.nodes, self.decode]
        for node in nodes:
            self._stack.push_async_callback(node.close)
            await node.start()
        (group_socket, group_port), (steps_socket, steps_port) = bind_router(HERE, 0), bind_router(HERE, 0)
        self.steps_address = f"tcp://{HERE}:{steps_port}"
        steps = self.steps = StepLeader(
            steps_socket,
            world_size=STAGES,
            shards=1,
            places=(PAGES, 0),
            neighbours=self.models[0].neighbours,
            on_hello=lambda hello: None,
            on_token=self._on_token,
            on_broken=self._on_broken,
            on_ready=self._on_ready,
            on_unusable=lambda error: self.broken.append(str(error)),
        )
        pool = self.nodes[0].pool
        self.engine = PrefillEngine(
            self.models[0], pool, pool.pages, self.threads[0], lockstep=steps, samples=False, **options
        )
        leader = GroupLeader(Incarnation(1000), STAGES, now=monotonic())
        self.leader = LeaderShell(
            leader, socket=group_socket, refuse_room=self.nodes[0].refuse, wait_dead=wait_dead, counts=Counts(),
            now=monotonic,
        )  # fmt: skip
        first = self._member(0, group_port, self._open_first)
        self.group = PrefillGroup(self.leader, first, self.engine, steps)
        self.follower = self._follower(steps_port)
        second = self._member(1, group_port, self._open_second)
        passing = asyncio.create_task(self._pass_started(second))
        await self.engine.start()
        await steps.start()
        await self.group.start()
        await self.follower.start()
        await self.decode_engine.start()
        self._stack.push_async_callback(self._stop, passing, [group_socket, steps_socket])
        await until(lambda: not self.group.unavailable_reason)

    async def _stop(self, passing: asyncio.Task[None], sockets: list[Any]) -> None:
        passing.cancel()
        await self.group.close()
        await self.steps.close()
        await self.engine.close()
        await self.follower.close()
        await self.decode_engine.close()
        await self.leader.close()
        for member in self.members:
            await member.drain(5.0)
            await member.stop()
        for socket in (*sockets, *(member.socket for member in self.members), self.dealer):
            socket.close()
        for thread in self.threads:
            thread.shutdown()

    def _on_token(self, ticket: int, token: TokenOut) -> None:
        self.group.first_token(ticket, token)

    def _on_ready(self) -> None:
        self.engine.wake()

    def _on_broken(self, cause: Any) -> None:
        self.broken.append(str(cause))
        self.group.broken(cause)

    def _member(self, rank: int, port: int, open_room: OpenRoom) -> MemberShell:
        member = GroupMember(Incarnation(rank + 1), rank, STAGES, now=monotonic())
        socket = connect_dealer(f"tcp://{HERE}:{port}", rank + 1)
        shell = MemberShell(
            member, socket=socket, open_room=open_room, refuse_room=self.nodes[rank].refuse, wait_dead=wait_dead,
            counts=Counts(), now=monotonic,
        )  # fmt: skip
        self.members.append(shell)
        return shell

    def _follower(self, port: int) -> StepFollower:
        node, model = self.nodes[1], self.models[1]
        self.dealer = connect_dealer(f"tcp://{HERE}:{port}", 2)
        info = node.info
        life = wire.RankLife(incarnation=node.incarnation, control=info.control, backend="local", pool=info.pool)
        return StepFollower(
            PrefillSteps(model, node.pool, node.pool.pages, self.threads[1]),
            self.dealer,
            hello=wire.Hello(member=Incarnation(2), rank=Rank(1), pages=PAGES, rows=0, info=life),
            status=self._status,
            neighbours=model.neighbours,
            eos_ids=model.eos_ids,
        )

    def _status(self) -> wire.Status:
        return wire.Status(
            rank=Rank(1), pid=1, pages_free=0, pages_total=PAGES, pages_at_rest=True, pinned_pages=0, rooms={},
            requests=len(self.follower.requests), tickets=0, bytes_moved=0, failed_steps=0, handler_errors=0, dropped=0,
        )  # fmt: skip

    def _open_first(self, key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
        return self.nodes[0].room(room, wire.parse_prompt(request).checked)

    def _open_second(self, key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
        asked = wire.parse_prompt(request)
        opened = self.nodes[1].room(room, asked.checked)
        self.follower.add(key.ticket, opened, asked.tokens, asked.params)
        return opened

    async def _pass_started(self, member: MemberShell) -> None:
        while True:
            self.follower.started((await member.started()).key.ticket)

    def prefill(self, room: int, prompt: list[int], params: SamplingParams) -> asyncio.Task[TokenOut]:
        return asyncio.create_task(self.group.prefill(room, prompt, check_prompt(prompt), params, 60.0))

    async def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """One request through both ranks and decode. Raises what prefill raises, or decode."""
        number = next(self.rooms)
        admission = await self.decode_engine.admit(prompt, params)
        leg = self.prefill(number, prompt, params)
        found: list[int] = []
        try:
            room = await self.decode.room(number, [node.info for node in self.nodes], prompt)
            async for out in self.decode_engine.generate(room, prompt, params, admission):
                found.append(out.token_id)
            assert (await leg).token_id == found[0]
        except KvflowError:
            await asyncio.wait([leg])
            await leg
            raise
        finally:
            admission.release()
            await asyncio.wait([leg])
        return found

    async def rest(self) -> None:
        """Nothing is left of any request, at either rank or at decode."""
        await until(lambda: all(node.pool.pages.at_rest() and not node.shell.endpoint.rooms for node in self.nodes))
        await until(lambda: not (self.follower.requests or self.group.running or self.target.pages.free_pages != PAGES))
        await until(lambda: not any(shell.requests or shell.member.tickets for shell in self.members))
        assert not any(shell.counts.handler_errors for shell in [*self.members, self.leader])
        assert not self.steps.dropped and not self.follower.dropped


@asynccontextmanager
async def group(models: list[LoadedModel], whole: LoadedModel, **options: int) -> AsyncIterator[Stages]:
    async with AsyncExitStack() as stack:
        found = Stages(models, whole, stack)
        await found.start(**options)
        yield found


async def test_stages_compute_in_lockstep_what_one_rank_does(
    stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    prompts = [prompt_of(n, n) for n in (1, 3, 17, 40, 64)]
    async with group(stages, llama, chunk_tokens=8, max_batch_tokens=20) as ranks:
        found = await asyncio.gather(*(ranks.tokens(prompt, greedy(6)) for prompt in prompts))
        await ranks.rest()
        assert not ranks.broken
    assert found == [tiny_models.generate(stock("llama"), prompt, 6) for prompt in prompts]


async def test_a_step_that_fails_at_one_rank_fails_what_runs_and_no_more(
    stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    """The first rank has gone on to the next steps, whose hidden states nobody takes."""
    async with group(stages, llama, chunk_tokens=4, max_batch_tokens=4) as ranks:
        runner = ranks.follower.steps.runner
        honest = runner.forward

        def failing(rows: list[Row]) -> torch.Tensor:
            runner.forward = honest  # type: ignore[method-assign]
            raise RuntimeError("planted")

        runner.forward = failing  # type: ignore[method-assign]
        legs = [asyncio.create_task(ranks.tokens(prompt_of(40, n), greedy(2))) for n in range(3)]
        for leg in legs:
            with pytest.raises(RefusedError, match="prefill step failed: RuntimeError"):
                await leg
        await ranks.rest()
        assert ranks.broken == ["engine_error: prefill step failed: RuntimeError"]
        assert await ranks.tokens(prompt_of(40), greedy(4)) == tiny_models.generate(stock("llama"), prompt_of(40), 4)
        await ranks.rest()


async def test_clients_that_leave_take_their_requests_along(
    stages: list[LoadedModel], llama: LoadedModel, stock: Callable[[str], Any]
) -> None:
    """Before decode's half has come, and in the middle of their steps; the others get their tokens."""
    async with group(stages, llama, chunk_tokens=4, max_batch_tokens=12) as ranks:
        alone = ranks.prefill(next(ranks.rooms), prompt_of(20), greedy(1))
        await until(lambda: len(ranks.follower.requests) == 1)
        alone.cancel()
        await asyncio.wait([alone])
        legs = [asyncio.create_task(ranks.tokens(prompt_of(40, n), greedy(4))) for n in range(8)]
        await until(lambda: ranks.steps._step > 6)
        for leg in legs[::2]:
            leg.cancel()
        await asyncio.wait(legs)
        for number, leg in enumerate(legs):
            if not number % 2:
                assert leg.cancelled()
            else:
                assert leg.result() == tiny_models.generate(stock("llama"), prompt_of(40, number), 4)
        assert not ranks.broken


async def test_what_a_rank_must_not_say_changes_nothing(stages: list[LoadedModel], llama: LoadedModel) -> None:
    async with group(stages, llama) as ranks:
        stranger = connect_dealer(ranks.steps_address, 77)
        info = ranks.follower._hello.info
        for frame in (
            b"",
            b"\xc1",
            wire.encode(wire.Hello(member=Incarnation(2), rank=Rank(1), pages=1, rows=0, info=info)),
            wire.encode(wire.StepFailed(generation=1, cause=Cause(Code.ENGINE_ERROR))),
            wire.encode(wire.Hello(member=Incarnation(77), rank=Rank(9), pages=1, rows=0, info=info)),
        ):
            stranger.send(frame)
        await until(lambda: ranks.steps.dropped == 5)
        stranger.close()
        assert ranks.steps.ready and not ranks.broken
        ranks.follower._receive(wire.Drop(ticket=5))  # it overtakes the request's opening
        await until(lambda: ranks.follower._early == {5})
        with pytest.raises(CapacityError, match="pages for the prompt"):
            await ranks.prefill(1, prompt_of(PAGES * PAGE_SIZE + 1), greedy(1))


def test_requests_of_a_group_are_checked_where_they_arrive() -> None:
    params = SamplingParams(logit_bias=((1, 2.0),))
    good = wire.GroupPrompt(ids=b"\x01\0\0\0", digest=bytes(32), params=params, deadline_s=1)
    assert wire.parse_prompt(wire.encode(good)) == good
    for bad in (
        b"",
        wire.encode(msgspec.structs.replace(good, ids=b"")),
        wire.encode(msgspec.structs.replace(good, ids=b"\0\0\0\0\0")),
        wire.encode(msgspec.structs.replace(good, digest=b"short")),
        wire.encode(msgspec.structs.replace(good, deadline_s=-1)),
    ):
        with pytest.raises(WireError):
            wire.parse_prompt(bad)
    broken = msgspec.msgpack.decode(wire.encode(good))
    broken[3]["temperature"] = -1.0
    with pytest.raises(MisuseError, match="temperature"):
        wire.parse_prompt(wire.encode(broken))
    row = wire.PlannedRow(1, 1, 0)
    for plan in (wire.Plan(generation=1, step=1, rows=()), wire.Plan(generation=0, step=1, rows=(row,))):
        with pytest.raises(WireError):
            wire.parse_at_others(wire.encode(plan))
