"""The other ranks of a worker, as child processes that the first one starts and restarts."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Self

import msgspec

from kvflow.protocols.errors import KvflowError, LostError, MisuseError
from kvflow.serve.config.settings import Settings
from kvflow.serve.launch.child import Child, ChildEndedError, first_end, start_together

RANK = "KVFLOW_RANK"  # environment variable with the spec of a child
START_S = 1800.0  # time in which a rank must load its part of the model
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0  # pauses before a rank that ended is started again
STEADY_S = 60.0  # a run this long resets the pause to the first one
STOP_S = 5.0
log = logging.getLogger("kvflow.serve")


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a rank, which the first rank passes to it.

    The parts of the model meet in the directory `meeting`. `attempt` is the number of earlier
    starts of the stage.
    """

    rank: int
    stages: int
    shards: int
    attempt: int
    meeting: str
    settings: Settings

    @classmethod
    def from_environment(cls) -> Self:
        """Read the spec. Raises: MisuseError if the first rank did not start this process."""
        text = os.environ.pop(RANK, "")
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            found = f"cannot be read: {error}" if text else "is not set"
            raise MisuseError(
                f"{RANK} {found}; the first rank of a worker starts this command, start that one "
                "(--pp, --tp)"
            ) from None


class PrefillRankSpec(RankSpec, frozen=True, kw_only=True):
    """A prefill's rank.

    `group` and `steps` are addresses of the first rank's sockets. `key` is their key file.
    """

    group: str
    steps: str
    key: str


class DecodeRankSpec(RankSpec, frozen=True, kw_only=True):
    """A decode's rank. `links` maps ranks to descriptors of their connections to the first rank."""

    links: dict[int, int]


class RankProcesses:
    """The processes of all ranks but the first.

    The shards of one stage cannot work without each other, so they are restarted together.
    """

    def __init__(
        self,
        first: RankSpec,
        command: str,
        *,
        on_lost: Callable[[int, str], None],
        on_fatal: Callable[[KvflowError], None],
        descriptors: tuple[int, ...] = (),
        own: Mapping[int, int] | None = None,
    ) -> None:
        """Prepare the ranks. `first` is the first rank's spec, and `command` runs the others.

        `on_lost` is called for every rank whose process ended, and for those restarted with it.
        `on_fatal` is called if the first start of a rank fails, or if a shard of the first rank's
        own stage ends. Every rank inherits `descriptors`, and the descriptor that `own` has under
        the rank's number.
        """
        self._first = first
        self._command = command
        self._on_lost = on_lost
        self._on_fatal = on_fatal
        self._descriptors = (*descriptors, *_inherited(first.settings.control_key_file))
        self._own = own or {}
        self.children: dict[int, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        stages, shards = self._first.stages, self._first.shards
        together = [[stage * shards + shard for shard in range(shards)] for stage in range(stages)]
        for ranks in together:
            others = [rank for rank in ranks if rank]
            if others:
                keep = self._keep(others, needed=0 in ranks)
                self._tasks.append(asyncio.create_task(keep, name=f"kvflow-ranks-{others[0]}"))

    async def close(self) -> None:
        """Stop all ranks, and do not restart them."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(child.stop(STOP_S) for child in self.children.values()))

    async def _keep(self, ranks: list[int], *, needed: bool) -> None:
        attempt, pause_s = 0, FIRST_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            error: KvflowError
            began_s, started = loop.time(), False
            self.children.update((rank, self._child(rank)) for rank in ranks)
            try:
                await self._all_started(ranks, attempt)
                started = True
                error = await first_end(self.children[rank] for rank in ranks)
            except (ChildEndedError, LostError) as ended:
                error = ended
            for rank in ranks:
                self._on_lost(rank, str(error))
            # The first rank would have to load its own part again for a new shard of its stage. A
            # rank that fails at its very first start would fail again.
            if needed or not (started or attempt):
                self._on_fatal(error)
                return
            for rank in ranks:
                self.children[rank].kill()
            await asyncio.gather(*(self.children[rank].stop(STOP_S) for rank in ranks))
            if loop.time() - began_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            else:
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            log.error("%s; starting %s again in %g s", error, _names(ranks), pause_s)
            await asyncio.sleep(pause_s)
            attempt += 1

    def _child(self, rank: int) -> Child:
        log_format = self._first.settings.log_format
        descriptors = (*self._descriptors, *([self._own[rank]] if rank in self._own else []))
        return Child(
            f"rank-{rank}",
            self._command,
            [],
            quiet=False,
            log_format=log_format,
            descriptors=descriptors,
        )

    async def _all_started(self, ranks: list[int], attempt: int) -> None:
        starts = []
        for rank in ranks:
            spec = msgspec.structs.replace(self._first, rank=rank, attempt=attempt)
            starts.append(
                (self.children[rank], {**os.environ, RANK: msgspec.json.encode(spec).decode()})
            )
        try:
            await start_together(starts, START_S)
        except TimeoutError:
            raise LostError(f"{_names(ranks)}: not ready within {START_S:g} s") from None
        except OSError as error:
            raise LostError(f"{_names(ranks)}: cannot start: {error}") from None


def end_at_once(role: str, error: BaseException) -> None:
    """End this process, whose rank cannot continue. A step may hang, so nothing is drained."""
    sys.stderr.write(f"kvflow {role}: error: {' '.join(str(error).split())}\n")
    sys.stderr.flush()
    os._exit(error.status if isinstance(error, ChildEndedError) and error.status == 2 else 1)


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _inherited(path: str) -> tuple[int, ...]:
    # A child that opens the path of a descriptor must inherit it.
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/([0-9]+)", path)
    return (int(found[1]),) if found else ()
