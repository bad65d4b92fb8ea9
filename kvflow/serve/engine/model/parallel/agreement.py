"""Facts that the processes of one model exchange through a file while they load it."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kvflow.protocols.errors import LostError, MisuseError
from kvflow.protocols.ports import ProcessIdentity
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart
from kvflow.transports.host.identity import is_alive, own_identity

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
_POLL_S = 0.02


class ProcessOfRank(NamedTuple):
    """The process of a rank, and the number of earlier starts of its stage."""

    attempt: int
    identity: ProcessIdentity


class OtherRankError(MisuseError):
    """Another process could not load its part."""


class Agreement:
    """One process's side of the exchange.

    Every process states facts under the same names, in the same order, and waits for the others.
    """

    def __init__(self, part: ModelPart, meeting: Meeting) -> None:
        """Publish this process's identity. Raises: MisuseError if `meeting` is not private."""
        # The class is public, but missing from torch's type stubs.
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        meeting.check()
        self._part, self._attempt, self._timeout_s = part, meeting.attempt, meeting.load_timeout_s
        self.store: Store = FileStore(str(meeting.directory / "agreement"), -1)
        self.store.set_timeout(timedelta(seconds=meeting.load_timeout_s))
        # Clear a failure that an earlier process of this rank may have stated.
        self.store.set(f"failed/{part.rank}", "")
        mine = ProcessOfRank(meeting.attempt, own_identity())
        self.store.set(f"process/{part.rank}", msgspec.json.encode(mine).decode())

    def wait_for_weights(self) -> None:
        """Block until all shards of the stage load their weights.

        Raises: OtherRankError, LostError.
        """
        self.exchange(f"weights/{self._attempt}", True, self._part.beside)

    def exchange(self, what: str, mine: T, ranks: range | None = None) -> list[T]:
        """State `mine` under the name `what`, and return the values that `ranks` state (by default
        all ranks). Blocks until each of them states its value.

        Raises: OtherRankError if a rank could not load its part; LostError if the process of a rank
        ended, or stated no value before the timeout.
        """
        self.store.set(f"{what}/{self._part.rank}", msgspec.json.encode(mine).decode())
        deadline, found = time.monotonic() + self._timeout_s, []
        for rank in range(self._part.ranks) if ranks is None else ranks:
            while not self.store.check([f"{what}/{rank}"]):
                self._check_failures()
                self._check_runs(rank)
                if time.monotonic() > deadline:
                    raise LostError(
                        f"rank {rank} has said nothing of its part of the model for "
                        f"{self._timeout_s:g} s"
                    )
                time.sleep(_POLL_S)
            found.append(msgspec.json.decode(self.store.get(f"{what}/{rank}"), type=type(mine)))
        return found

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this one failed to load, so that they stop waiting."""
        self.store.set(f"failed/{self._part.rank}", str(error) or type(error).__name__)

    def _check_runs(self, rank: int) -> None:
        key = f"process/{rank}"
        if self.store.check([key]):
            found = self.store.get(key)
            other = msgspec.json.decode(found, type=ProcessOfRank)
            if rank in self._part.beside and other.attempt < self._attempt:
                # The rank restarts too, and its new process has not stated its identity yet.
                return
            # The entry is read again, because a restarted process may have replaced it.
            if not is_alive(other.identity) and self.store.get(key) == found:
                raise LostError(f"rank {rank} has ended while it loaded its part of the model")

    def _check_failures(self) -> None:
        for rank in range(self._part.ranks):
            key = f"failed/{rank}"
            if (
                rank != self._part.rank
                and self.store.check([key])
                and (text := self.store.get(key).decode())
            ):
                raise OtherRankError(f"rank {rank} cannot load its part of the model: {text}")
