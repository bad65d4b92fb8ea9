"""The decode node, on asyncio."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from kvflow.handlers.connections import Connect
from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory.page_waiter import PageWaiter
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import StagedArrivals, Staging
from kvflow.node.base import Node
from kvflow.protocols.arguments import (
    CheckedPrompt,
    TokenIds,
    check_cause,
    check_prompt,
    pages_wanted,
    room_id,
)
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import Cause, KvflowError, LostError, MisuseError
from kvflow.protocols.limits import Bounds, Timing, check_time
from kvflow.protocols.machines.ownership import PageKind
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Checksums, DataPlane, PageStore
from kvflow.protocols.waiting import Waits
from kvflow.protocols.wire.ranks import (
    RankInfo,
    check_dp_rank,
    check_infos,
    group_for,
    groups_to_tell,
)
from kvflow.transports.control.zmq import connect_dealer

log = logging.getLogger(__name__)
Resolve = Callable[[str], Awaitable[Sequence[RankInfo]]]
"""Resolves a prefill's name to the ranks of all its groups, in rank order. The user decides what a
name means.

Raises: LostError.
"""


class DecodeNode(Node[DecodeShell]):
    """A decode node. For each room it lends pages of its pool to prefill ranks."""

    role = "decode"

    def __init__(
        self,
        pool: PagedPool,
        plane: DataPlane | str,
        *,
        host: str = "127.0.0.1",
        resolve: Resolve | None = None,
        pages: PageStore | None = None,
        timing: Timing | None = None,
        bounds: Bounds | None = None,
        incarnation: int | None = None,
        verify_transfers: bool = False,
        staging: Staging | None = None,
        connect: Connect = connect_dealer,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """Create a node over `pool`. It opens rooms only after `start`.

        `plane` is a data plane, or the name of one. If it is a name, prefills reach that plane at
        `host`. `resolve` is needed for rooms whose prefill is given by name, for example
        `RegistryClient.resolve`. `pages` is the store of the pool's pages, by default the pool's
        own allocator.

        `verify_transfers`: a chunk counts as landed only if its checksum equals the one that
        prefill sent. Prefill needs this option as well. If the checksums differ, the room fails.
        Prefill is notified, unless the chunk is the last one: prefill's half has then already
        succeeded.

        `staging`: peers write into this host memory instead of the pool, and a chunk counts as
        landed once it is copied to the pool. Rooms wait for free staging pages until their
        deadline. The caller closes the staging.
        """
        super().__init__(
            pool,
            plane,
            host=host,
            pages=pages,
            timing=timing,
            bounds=bounds,
            incarnation=incarnation,
            verify_transfers=verify_transfers,
            staging=staging,
            now=now,
        )
        self._arrivals = (
            None if staging is None else StagedArrivals(staging, verify=verify_transfers)
        )
        # Other nodes over the same staging may return pages for which rooms of this node wait.
        self._returned: PageWaiter | None = None
        self._verify = verify_transfers
        self._resolve, self._connect = resolve, connect
        self._ranks: dict[str, Sequence[RankInfo]] = {}
        self._asking: dict[str, asyncio.Future[Sequence[RankInfo]]] = {}

    def _sums(self) -> Checksums | None:
        # With staging, `StagedArrivals` computes the checksums, over the memory where pages land.
        return super()._sums() if self.staging is None else None

    @property
    def staging_at_rest(self) -> bool:
        return self.staging is None or self.reached.places.at_rest()

    @property
    def staging_waits(self) -> Waits | None:
        if self.staging is None:
            return None
        return self.shell.waiting.report(self.shell.staging_can_come_back, self._now())

    @property
    def unavailable_reason(self) -> str:
        """Reason why this decode opens no rooms: its quarantine is above the limit. Empty if it
        opens rooms.
        """
        return self.shell.endpoint.core.ledger.excess

    def peers(self) -> list[dict[str, Any]]:
        return [
            {
                "incarnation": f"{peer.key.incarnation:016x}",
                "control": peer.key.control,
                "rank": peer.info.rank,
                "phase": peer.phase.name.lower(),
                "heard_ago_s": round(self._now() - peer.received_at_s, 3),
                "loans": (owed := self.shell.endpoint.core.ledger.owed_by(peer))[0],
                "quarantine_pages": owed[1],
            }
            for peer in self.shell.endpoint.peers
        ] + self._earlier_writers()

    async def start(self) -> None:
        self._check_start()
        address, layout = self.exported
        if self.reached.segment is not None:
            # Peers on this machine check the claim when they map the segment.
            self.reached.segment.claim(self.incarnation)
        self._shell = DecodeShell(
            DecodeEndpoint(
                DecodeIdentity(self.incarnation, layout, address),
                observer=self.counts,
                timing=self.timing,
                bounds=self.bounds,
                verify=self._verify,
                staged=self._arrivals is not None,
            ),
            pages=self.pages,
            plane=self.plane,
            connect=self._connect,
            counts=self.counts,
            now=self._now,
            stores=self._stores,
            checksums=self._checksums,
            arrivals=self._arrivals,
        )
        if self.staging is not None:
            self._returned = PageWaiter(self._lend_returned, *self.staging.host.allocators)
            self._returned.look()
            self._returned.wait()

    def _lend_returned(self) -> None:
        assert self._returned is not None
        self._returned.wait()
        self.shell.lend_returned()

    def room(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds | CheckedPrompt,
        *,
        deadline_s: float | None = None,
        prefix_tokens: int = 0,
        pages: Sequence[int] | PageIndices | None = None,
        dp_rank: int | None = None,
    ) -> DecodeRoom:
        """Open a room at `prefill` for a prompt of token ids.

        Await or enter the returned room to wait until it is open. `prefill` is a name for
        `resolve`, or the ranks themselves. The deadline covers the whole room, linking included.
        `prefix_tokens` is the number of leading tokens that decode already has: whole pages, or the
        whole prompt. `pages` are pages of your own allocator for the rest of the prompt; you may
        reuse them after `released()`. `dp_rank` selects the group of a data-parallel prefill, by
        default `room % dp_size`.

        Raises: MisuseError. Awaiting the room raises LostError (prefill does not answer),
        RefusedError (the pools do not fit), CapacityError, or AbortedError while shutting down.
        """
        return self._open(
            room, prefill, prompt, deadline_s, prefix_tokens, pages, dp_rank, held_back=False
        )

    def announce(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds | CheckedPrompt,
        *,
        deadline_s: float | None = None,
        prefix_tokens: int = 0,
        pages: Sequence[int] | PageIndices | None = None,
        dp_rank: int | None = None,
    ) -> DecodeRoom:
        """Announce a room before its pages are available.

        Prefill's half waits for this room, and the room takes no pages before `offer()`. If the
        room is closed instead, prefill receives the cause. For arguments and errors, see `room`.
        """
        return self._open(
            room, prefill, prompt, deadline_s, prefix_tokens, pages, dp_rank, held_back=True
        )

    def refuse(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        cause: Cause,
        *,
        dp_rank: int | None = None,
    ) -> None:
        """Refuse a request, and send the cause to its prefill ranks.

        If no group has the number `dp_rank`, the ranks of all groups receive it. Raises:
        MisuseError for an invalid argument.
        """
        shell, number = self._open_shell, room_id(room)
        check_dp_rank(dp_rank)
        check_cause(cause)
        if isinstance(prefill, str):
            every = self._ranks.get(prefill)
        else:
            every = check_infos(prefill, "prefill")
        groups: list[Sequence[RankInfo]] | None = None
        # The known ranks may not be the whole group. `_refuse_at` then resolves the name again.
        with suppress(LostError):
            groups = None if every is None else groups_to_tell(every, number, dp_rank)
        if isinstance(prefill, str) and not (groups and self._all_linked(groups)):
            told = self._refuse_at(number, prefill, dp_rank, cause)
            shell.spawn(told, f"kvflow-refuse-{number}", of_caller=True)
            return
        for ranks in groups or ():
            shell.refuse(number, ranks, cause)

    async def _refuse_at(self, room: int, prefill: str, dp_rank: int | None, cause: Cause) -> None:
        try:
            groups = groups_to_tell(await self._ask(prefill), room, dp_rank)
        except KvflowError as error:
            log.info("cannot tell prefill %s that room %d is refused: %s", prefill, room, error)
        else:
            for ranks in groups:
                self.shell.refuse(room, ranks, cause)

    def _all_linked(self, groups: Sequence[Sequence[RankInfo]]) -> bool:
        find = self.shell.endpoint.link_to
        return all(find(info) is not None for ranks in groups for info in ranks)

    def _open(
        self,
        room: int,
        prefill: str | Sequence[RankInfo],
        prompt: TokenIds | CheckedPrompt,
        deadline_s: float | None,
        prefix_tokens: int,
        pages: Sequence[int] | PageIndices | None,
        dp_rank: int | None,
        *,
        held_back: bool,
    ) -> DecodeRoom:
        shell, number = self._open_shell, room_id(room)
        tokens, digest = check_prompt(prompt)
        wanted = pages_wanted(self.pool.layout, tokens, prefix_tokens)
        if deadline_s is None:
            at_s = float("inf")
        else:
            at_s = self._now() + check_time("deadline_s", deadline_s)
        if dp_rank is not None:
            check_dp_rank(dp_rank)
        if not isinstance(prefill, str):
            one = (
                isinstance(prefill, list) and len(prefill) == 1 and isinstance(prefill[0], RankInfo)
            )
            named = prefill if one else check_infos(prefill, "prefill")
            alone = dp_rank is None and len(named) == 1
            ranks: Sequence[RankInfo] | None = named if alone else group_for(named, number, dp_rank)
        elif self._resolve is None:
            raise MisuseError(f"prefill {prefill!r}: this node was given no resolve()")
        else:
            ranks = self._known(prefill, number, dp_rank)
        agreed = Prompt(tokens, digest, prefix_tokens)
        handle = DecodeRoom(shell, number, tokens, wanted)
        if pages is not None:
            handle.give(pages)
        handle.held_back = held_back
        try:
            if ranks is None and isinstance(prefill, str):
                ask = functools.partial(self._ask_group, prefill, number, dp_rank)
                shell.resolve_and_open(handle, ask, agreed, at_s)
            else:
                shell.open(handle, ranks or (), agreed, at_s, announce=held_back)
        except BaseException:
            # If the caller gave pages, the room already holds them.
            if handle.record is None:
                handle.holding.feed(PageKind.FREE)
            raise
        return handle

    def _known(self, prefill: str, room: int, dp_rank: int | None) -> Sequence[RankInfo] | None:
        """Return the ranks of a room's group if all of them are linked; None if they must be
        resolved.
        """
        if (every := self._ranks.get(prefill)) is None:
            return None
        one_group = not every or (every[0].dp_size == 1 and dp_rank is None)
        ranks = every if one_group else group_for(every, room, dp_rank)
        return ranks if self._all_linked([ranks]) else None

    async def _ask_group(self, prefill: str, room: int, dp_rank: int | None) -> Sequence[RankInfo]:
        return group_for(await self._ask(prefill), room, dp_rank)

    async def _ask(self, prefill: str) -> Sequence[RankInfo]:
        """Resolve a name. All rooms that wait for the same name share one call."""
        task = self._asking.get(prefill)
        if task is None:
            task = self._asking[prefill] = asyncio.ensure_future(self._answer(prefill))
            task.add_done_callback(functools.partial(self._answered, prefill))
        # Other rooms may wait for the same task, so cancelling one room must not cancel it.
        ranks = self._ranks[prefill] = await asyncio.shield(task)
        return ranks

    def _answered(self, prefill: str, task: asyncio.Future[Sequence[RankInfo]]) -> None:
        self._asking.pop(prefill, None)
        if not task.cancelled():
            # If every room that waited has ended, asyncio would log the error as never retrieved.
            task.exception()

    async def _answer(self, prefill: str) -> Sequence[RankInfo]:
        assert self._resolve is not None
        return check_infos(await self._resolve(prefill), f"what resolve({prefill!r}) returns")

    async def _close(self) -> None:
        if self._shell is not None:
            await self._shell.close()
            self._unproven = self._unproven_loans()
        for asking in (questions := list(self._asking.values())):
            asking.cancel()
        # A resolver that ignores its cancellation must not keep the node from closing.
        if questions:
            await asyncio.wait(questions, timeout=self.timing.lost_after_s)
        if self._returned is not None:
            self._returned.close()
        await self._close_memory()
        if self.reached.segment is not None:
            self.reached.segment.disclaim(self.incarnation)
