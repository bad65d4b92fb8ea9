"""The processes that run steps together with this one: adjacent stages, and the other shards of its
stage.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from kvflow.protocols.errors import LostError
from kvflow.serve.engine.model.parallel.link import (
    HiddenReceiver,
    HiddenSender,
    HiddenSink,
    HiddenSource,
)
from kvflow.serve.engine.model.parallel.part import ModelPart
from kvflow.serve.engine.model.parallel.shards import ShardGroup
from kvflow.serve.engine.model.parallel.stage import StageEnd, passage
from kvflow.serve.engine.model.step import Row


class Followers(Protocol):
    """The other shards of the decode whose engine runs in this process.

    They run the same steps.
    """

    def check(self) -> None:
        """Raises: LostError, with the reason, if a shard is gone."""

    def announce(self, rows: list[Row]) -> None:
        """Announce a step that begins in this process. Raises: LostError if a shard is gone."""

    def rest(self) -> None:
        """Announce that no step follows soon."""

    def failed(self, error: Exception) -> LostError:
        """Report that an announced step failed in this process, and return the error to raise.

        No other step can run afterwards.
        """

    def wait(self) -> None:
        """Block until every other shard finishes all announced steps or its process exits.

        Any thread may call this.
        """


class Neighbours:
    """The stages and shards around one part of a model.

    While a step runs, other threads may call only `abort`.
    """

    def __init__(
        self,
        source: HiddenSource | None = None,
        sink: HiddenSink | None = None,
        shards: ShardGroup | None = None,
    ) -> None:
        """`source` is None in the first stage, and `sink` in the last. `shards` is None if the
        stage has one shard.
        """
        self._source, self._sink, self._shards = source, sink, shards
        self._followers: Followers | None = None
        self._aborted = self._broken = False

    def lead(self, followers: Followers) -> None:
        self._followers = followers

    def rest(self) -> None:
        if self._followers is not None:
            self._followers.rest()

    def wait_for_followers(self) -> None:
        """Block until no follower reads or writes for a step that began in this process."""
        if self._followers is not None:
            self._followers.wait()

    @property
    def returns_logits(self) -> bool:
        """True in the last stage, which computes the logits."""
        return self._sink is None

    def begin(self, generation: int) -> None:
        """Begin a generation: count its steps from 0, and drop earlier hidden states.

        `generation` is the same in all processes, and larger than every earlier one.

        Raises: LostError if the group of shards was aborted, or a shard is gone.
        """
        if self._broken:
            raise LostError(
                "the shards of this stage have lost each other: start all processes of the stage "
                "again"
            )
        self._aborted = False
        for link in (self._source, self._sink):
            if link is not None:
                link.begin(generation)

    @property
    def broken(self) -> bool:
        """True once the group of shards ends. `begin` then raises."""
        return self._broken

    def abort(self, *, shards: bool = True) -> None:
        """Make the running step raise where it waits for another process, and make every later
        step raise until `begin`.

        Any thread may call this. With `shards` False, the shards of this stage continue to wait for
        each other, and all of them must run the same steps to their end. Only a receive from
        another stage raises. Hidden states for the next stage are discarded: if sending them
        raised, a shard whose send waits would stop at an earlier call of the model than another.
        """
        if self._source is not None:
            self._source.abort()
        if self._shards is not None and not shards:
            if self._sink is not None:
                self._sink.discard()
            return
        self._aborted, self._broken = True, self._shards is not None
        for part in (self._sink, self._shards):
            if part is not None:
                part.abort()

    def close(self) -> None:
        for part in (self._source, self._sink, self._shards):
            if part is not None:
                part.close()

    @contextlib.contextmanager
    def step(self, rows: list[Row]) -> Iterator[None]:
        """Return a context for the step of `rows`. Forwards in it send and receive hidden states.

        Raises: LostError if a shard or a stage is gone.
        """
        if self._aborted:
            if self._followers is not None:
                self._followers.check()
            raise LostError("the step was aborted before it began")
        for link in (self._source, self._sink):
            if link is not None:
                link.next_step()
        passage.source, passage.sink = self._source, self._sink
        try:
            if self._followers is not None:
                self._followers.announce(rows)
            yield
        except Exception as error:
            lost = self._lost_shard(error)
            if self._followers is not None:
                self._broken = True
                lost = self._followers.failed(lost or error)
            if lost is None:
                raise
            raise lost from error
        finally:
            passage.source = passage.sink = None

    def _lost_shard(self, error: Exception) -> LostError | None:
        # gloo has no exception type: its errors are recognised by their text.
        if self._shards is None or not isinstance(error, RuntimeError) or "gloo" not in str(error):
            return None
        self._broken = True
        return LostError(f"a shard of this stage is gone: {_cause(error)}")

    def send(self, end: StageEnd) -> None:
        assert self._sink is not None
        self._sink.send(end.hidden)


def _cause(error: RuntimeError) -> str:
    """Return gloo's message without the source location and the advice that it contains."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]


ALONE = Neighbours()


def hidden_links(
    part: ModelPart, directory: Path
) -> tuple[HiddenReceiver | None, HiddenSender | None]:
    """Open this part's links from the stage before it and to the stage after it, in `directory`.

    Raises: MisuseError if a socket cannot be opened.
    """

    def address(stage: int) -> str:
        return f"ipc://{directory}/hidden-{stage}-{part.shard}"

    receiver = None if part.is_first else HiddenReceiver(address(part.stage))
    try:
        return receiver, None if part.is_last else HiddenSender(address(part.stage + 1))
    except BaseException:
        if receiver is not None:
            receiver.close()
        raise
