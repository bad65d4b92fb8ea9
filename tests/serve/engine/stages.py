"""Two stages of one model in one process as ranks of a prefill over real sockets, and a decode."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

from kvflow.aio import Threads
from kvflow.handlers.group import LeaderShell, MemberShell, OpenRoom
from kvflow.handlers.rooms import PrefillRoom
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.arguments import check_prompt
from kvflow.protocols.cache.choices import WritePolicy
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.errors import Cause, KvflowError
from kvflow.protocols.group.leader import GroupLeader
from kvflow.protocols.group.member import GroupMember, TicketKey
from kvflow.protocols.limits import Timing
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.messages import Incarnation, Rank, RoomId
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.ranks.following import StepFollower
from kvflow.serve.engine.ranks.group import PrefillGroup
from kvflow.serve.engine.ranks.leading import StepLeader
from kvflow.serve.engine.ranks.loading import ready
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.params import SamplingParams, TokenOut
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from kvflow.serve.engine.scheduler.prefill_steps import PrefillSteps
from kvflow.telemetry.counters import Counts
from kvflow.transports.control.zmq import bind_router, connect_dealer
from kvflow.transports.host.identity import wait_dead
from tests.serve.engine.pair import until

STAGES, PAGE_SIZE, PAGES = 2, 4, 64
HERE = "127.0.0.1"


def a_status(rank: int, **changes: Any) -> wire.Status:
    names = ("pages_free", "pages_total", "pinned_pages", "requests", "tickets", "bytes_moved")
    none = dict.fromkeys((*names, "failed_steps", "handler_errors", "dropped"), 0)
    given: dict[str, Any] = {"pid": 1, "pages_at_rest": True, "rooms": {}, **none, **changes}
    return wire.Status(rank=Rank(rank), **given)


class Stages:
    """A prefill of two ranks with `pages` each, whose engine has `options`, and a decode."""

    def __init__(
        self,
        models: list[LoadedModel],
        whole: LoadedModel,
        stack: AsyncExitStack,
        *,
        pages: tuple[int, int] = (PAGES, PAGES),
        rendezvous_s: float = Timing().rendezvous_s,
        caches: bool = False,
        host_pages: int = 0,
        write_policy: WritePolicy = "write_through",
        decode_caches: bool = False,
        **options: Any,
    ) -> None:
        self._options = options
        self.models, self.whole, self._stack, self._pages = models, whole, stack, pages
        self._timing = Timing(rendezvous_s=rendezvous_s)
        self.nodes = [self._node(rank) for rank in range(STAGES)]
        self._host_pages, self._write_policy = host_pages, write_policy
        self.caches = [self._cache(n) if caches else None for n in self.nodes]
        self.threads = [Threads("model") for _ in range(STAGES + 1)]
        self.members: list[MemberShell] = []
        self.broken: list[str] = []
        self.has_to_rest = True
        self._lives = itertools.count(2)
        layout = build_layout(
            whole.streams, page_size=PAGE_SIZE, num_pages=PAGES, fingerprint=whole.fingerprint
        )
        self.target = PagedPool.allocate(layout, shared=True)
        stack.callback(self.target.close)
        self.decode = DecodeNode(self.target, "local")
        self.decode_cache = PrefixCache(self.target.pages, PAGE_SIZE) if decode_caches else None
        self.decode_engine = DecodeEngine(
            whole, self.target, self.target.pages, self.threads[STAGES], cache=self.decode_cache
        )
        self.rooms = iter(range(1, 1000))

    def _cache(self, node: PrefillNode) -> PrefixCache:
        pool, count = node.pool, self._host_pages
        host = HostTier(pool, count * pool.layout.page_bytes) if count else None
        return PrefixCache(pool.pages, PAGE_SIZE, host=host, write_policy=self._write_policy)

    def _node(self, rank: int) -> PrefillNode:
        model, pages = self.models[rank], self._pages[rank]
        layout = build_layout(
            model.streams, page_size=PAGE_SIZE, num_pages=pages, fingerprint=model.fingerprint
        )
        pool = PagedPool.allocate(layout, shared=False)
        self._stack.callback(pool.close)
        return PrefillNode(pool, "local", rank=rank, world_size=STAGES, timing=self._timing)

    async def start(self) -> None:
        group_socket, self._group_port = bind_router(HERE, 0)
        steps_socket, self._steps_port = bind_router(HERE, 0)
        self.steps_address = f"tcp://{HERE}:{self._steps_port}"
        steps = self.steps = StepLeader(
            steps_socket,
            world_size=STAGES,
            shards=1,
            places=(self._pages[0], 0),
            neighbours=self.models[0].neighbours,
            on_hello=lambda hello: None,
            on_opened=self._of_group("opened_at"),
            on_token=self._of_group("first_token"),
            on_agreed=self._of_group("agreed"),
            on_broken=self._on_broken,
            on_ready=lambda: self.engine.wake(),  # noqa: PLW0108 - it is made after them
            on_unusable=lambda error: self.broken.append(str(error)),
        )
        self._tells_openings = self._options.get("optimistic_tries", 0) > 0
        pool = self.nodes[0].pool
        self.engine = PrefillEngine(
            self.models[0],
            pool,
            pool.pages,
            self.threads[0],
            lockstep=steps,
            samples=False,
            cache=self.caches[0],
            prefetch="wait_complete",
            **self._options,
        )
        leader = GroupLeader(Incarnation(1000), STAGES, now=monotonic())
        self.leader = LeaderShell(
            leader,
            socket=group_socket,
            refuse_room=self.nodes[0].refuse,
            wait_dead=wait_dead,
            counts=Counts(),
            now=monotonic,
        )
        await self.decode.start()
        await self.nodes[0].start()
        first = self._member(0, 1, self._open_first)
        self.group = PrefillGroup(self.leader, first, self.engine, steps)
        await self.engine.start()
        await steps.start()
        await self.group.start()
        await self.decode_engine.start()
        await self._start_second()
        self._stack.push_async_callback(self._stop, [group_socket, steps_socket])
        await until(lambda: not self.group.unavailable_reason)

    async def _start_second(self) -> None:
        await self.nodes[1].start()
        life = next(self._lives)
        self.follower = self._follower(life)
        second = self._member(1, life, self._open_second)
        self._passing = asyncio.create_task(self._pass_started(second, self.follower))
        await self.follower.start()

    async def replace_second(self) -> None:
        """End rank 1 with all that it has, and let another process of that rank take its place."""
        node, member = self.nodes[1], self.members[1]
        await self._stop_second(member)
        self._fence(node)
        assert node.pool.pages.at_rest(), (
            f"left at the rank that has ended: {node.pool.pages.owned()}"
        )
        self.leader.leader.member_died(member.member.incarnation)
        self.leader.run()
        self.steps.lost(1, "rank 1 of the group has died")
        self.nodes[1] = self._node(1)
        if self.caches[1] is not None:
            await self.caches[1].close()
            self.caches[1] = self._cache(self.nodes[1])
        await self._start_second()
        await until(lambda: not self.group.unavailable_reason)

    def _fence(self, node: PrefillNode) -> None:
        """Report the node's death to decode, because this process, its writer, lives on."""
        shell = self.decode.shell
        for peer in list(shell.endpoint.peers):
            if peer.key.incarnation == node.incarnation and peer.phase in (
                LinkPhase.UP,
                LinkPhase.SILENT,
            ):
                shell.endpoint.writer_died(peer.key, monotonic())
        shell.run()

    async def _stop_second(self, member: MemberShell) -> None:
        self._passing.cancel()
        await self.follower.close()
        await member.stop()
        await self.nodes[1].close()
        member.socket.close()
        self.dealer.close()

    async def _stop(self, sockets: list[Any]) -> None:
        await self.group.close()
        await self.steps.close()
        await self.engine.close()
        await self.decode_engine.close()
        await self.leader.close()
        for member in self.members:
            await member.drain(5.0)
        await self.decode.close()  # first: it may wait for a rank to drain
        await self._stop_second(self.members[1])
        await self.members[0].stop()
        await self.nodes[0].close()
        for cache in (*self.caches, self.decode_cache):
            if cache is not None:
                await cache.close()
        for socket in (*sockets, self.members[0].socket):
            socket.close()
        for thread in self.threads:
            thread.close()

    def _of_group(self, name: str) -> Callable[..., None]:
        def call(*given: Any) -> None:
            getattr(self.group, name)(*given)

        return call

    def _on_broken(self, cause: Cause) -> None:
        self.broken.append(str(cause))
        self.group.broken(cause)

    def _member(self, rank: int, life: int, open_room: OpenRoom) -> MemberShell:
        member = GroupMember(Incarnation(life), rank, STAGES, now=monotonic())
        socket = connect_dealer(f"tcp://{HERE}:{self._group_port}", life)
        shell = MemberShell(
            member,
            socket=socket,
            open_room=open_room,
            refuse_room=self.nodes[rank].refuse,
            wait_dead=wait_dead,
            counts=Counts(),
            now=monotonic,
            ready=functools.partial(ready, self.caches[rank], "wait_complete"),
        )
        self.members[rank : rank + 1] = [shell]
        return shell

    def _follower(self, life: int) -> StepFollower:
        node, model = self.nodes[1], self.models[1]
        self.dealer = connect_dealer(self.steps_address, life)
        info = node.info
        told = wire.RankLife(
            incarnation=node.incarnation, control=info.control, backend="local", pool=info.pool
        )
        return StepFollower(
            PrefillSteps(model, node.pool, node.pool.pages, self.threads[1], cache=self.caches[1]),
            self.dealer,
            hello=wire.Hello(
                member=Incarnation(life), rank=Rank(1), pages=self._pages[1], rows=0, info=told
            ),
            status=self._status,
            neighbours=model.neighbours,
            tells_openings=self._tells_openings,
            prefetch="wait_complete",
        )

    def _status(self) -> wire.Status:
        return a_status(1, pages_total=PAGES, requests=len(self.follower.requests))

    def _open_first(self, key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
        asked = wire.parse_prompt(request)
        opened = self.nodes[0].room(room, asked.checked, deadline_s=asked.deadline_s)
        self.group.opened(key.ticket, opened)
        return opened

    def _open_second(self, key: TicketKey, room: RoomId, request: bytes) -> PrefillRoom:
        asked = wire.parse_prompt(request)
        opened = self.nodes[1].room(room, asked.checked, deadline_s=asked.deadline_s)
        self.follower.add(key.ticket, opened, asked.tokens, asked.params, asked.namespace)
        return opened

    async def _pass_started(self, member: MemberShell, follower: StepFollower) -> None:
        while True:
            request = await member.started()
            follower.started(request.key.ticket)

    def prefill(
        self,
        room: int,
        prompt: list[int],
        params: SamplingParams,
        deadline_s: float = 60.0,
        namespace: Namespace = ANY,
    ) -> asyncio.Task[TokenOut]:
        checked = check_prompt(prompt)
        return asyncio.create_task(
            self.group.prefill(room, prompt, checked, params, deadline_s, namespace=namespace)
        )

    async def decoded(
        self,
        room: int,
        prompt: list[int],
        params: SamplingParams,
        begin: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Run decode's half of a request; call `begin` once it is admitted."""
        admission = await self.decode_engine.admit(prompt, params)
        try:
            begin()
            infos = [node.info for node in self.nodes]
            prefix = await self.decode_engine.cached(prompt, admission=admission)
            half = await self.decode.room(
                room, infos, prompt, prefix_tokens=prefix.tokens if prefix else 0
            )
            return [
                out.token_id
                async for out in self.decode_engine.generate(
                    half, prompt, params, admission, prefix
                )
            ]
        finally:
            admission.release()

    async def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        number = next(self.rooms)
        legs: list[asyncio.Task[TokenOut]] = []
        try:
            found = await self.decoded(
                number, prompt, params, lambda: legs.append(self.prefill(number, prompt, params))
            )
            assert (await legs[0]).token_id == found[0]
        except KvflowError:
            await asyncio.wait(legs)
            await legs[0]
            raise
        finally:
            await asyncio.gather(*legs, return_exceptions=True)
        return found

    def hold(self, *kinds: type) -> list[bytes]:
        held: list[bytes] = []
        send = self.dealer.send

        def sent(frame: bytes, *rest: Any, **more: Any) -> bool:
            if held or not isinstance(wire.parse_at_first(frame), kinds):
                return send(frame, *rest, **more)
            held.append(frame)
            return True

        self.dealer.send = sent  # type: ignore[method-assign]
        return held

    async def rest(self, *, drops_frames: bool = False) -> None:
        await self.home()
        assert not any(shell.counts.handler_errors for shell in [*self.members, self.leader])
        dropped = self.steps.dropped or self.follower.dropped or self.follower._dropped_ahead
        assert drops_frames or not dropped

    async def home(self, within_s: float = 20.0) -> None:
        """Wait until nothing of any request is left at any rank or at decode."""
        began_s = monotonic()
        while (left := self.left) and monotonic() - began_s < within_s:
            await asyncio.sleep(0.001)
        assert not left, f"left: {left}"

    @property
    def left(self) -> dict[str, Any]:
        engine, nodes = self.engine, self.nodes
        found = {
            "pages": [node.pool.pages.owned() for node in nodes if not node.pool.pages.at_rest()],
            "pages of decode": PAGES - self.target.pages.available_pages,
            "rooms": [room for node in nodes for room in node.shell.endpoint.rooms],
            "requests": (*self.follower.requests, *self.group._asked),
            "tickets": [
                key for shell in self.members for key in (*shell.requests, *shell.member.tickets)
            ],
            "in the engine": [
                *engine._placed,
                *engine._unmatched,
                *engine._running,
                *engine._waiting,
            ],
            "early": [engine.optimism.holding_now] * bool(engine.optimism.holding_now)
            + [*engine._early._losses],
            "preempted": self.steps._preempted,
            "questions": self.steps._hits._numbers,
            "short": engine._beginnings._short,
            "locked in caches": sum(c.stats().pages - c.evictable_pages for c in self.caches if c),
        }
        return {name: what for name, what in found.items() if what}


@asynccontextmanager
async def group(
    models: list[LoadedModel], whole: LoadedModel, *, drops_frames: bool = False, **options: Any
) -> AsyncIterator[Stages]:
    """Run a group with the options of `Stages`.

    In the end nothing is left of any request, and no frame was wrong unless it `drops_frames`.
    """
    async with AsyncExitStack() as stack:
        found = Stages(models, whole, stack, **options)
        await found.start()
        yield found
        if found.has_to_rest:
            await found.rest(drops_frames=drops_frames)


Grouped = Callable[..., AbstractAsyncContextManager[Stages]]
