"""The other processes that a step of this one needs: the stages before and after it, and the shards
beside it.
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
    """The other shards of a model whose engine is in this process.

    They run the same steps.
    """

    def announce(self, rows: list[Row]) -> None:
        """Announce a step that begins here. Raises: LostError."""

    def rest(self) -> None:
        """Announce that no step follows soon."""

    def failed(self, error: Exception) -> LostError:
        """Report that an announced step, in which they take part, failed here: no step can follow.

        Returns the error to raise.
        """

    def wait(self) -> None:
        """Return when each of them ended every announced step, or its process ended.

        Blocks; callable from any thread.
        """


class Neighbours:
    """The neighbours of one part. All methods but `abort` belong to the model thread."""

    def __init__(
        self,
        source: HiddenSource | None = None,
        sink: HiddenSink | None = None,
        shards: ShardGroup | None = None,
    ) -> None:
        """`source` is None in the first stage, `sink` in the last, and `shards` where a stage is
        one process.
        """
        self._source, self._sink, self._shards = source, sink, shards
        self._followers: Followers | None = None
        self._aborted = self._broken = False

    def lead(self, followers: Followers) -> None:
        """Announce every step to `followers` from now on."""
        self._followers = followers

    def rest(self) -> None:
        """Announce to the followers that no step follows soon."""
        if self._followers is not None:
            self._followers.rest()

    def wait_for_followers(self) -> None:
        """Return when no other process reads or writes for a step that began here.

        See `Followers.wait`.
        """
        if self._followers is not None:
            self._followers.wait()

    @property
    def returns_logits(self) -> bool:
        """False in all stages but the last."""
        return self._sink is None

    def begin(self, generation: int) -> None:
        """Count steps anew, and drop what is still under way of an earlier generation.

        `generation` is the same in all processes, and larger than every earlier one.

        Raises: LostError when the group of shards ended, by an abort or with one of them.
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
        """True after the group of shards ended: `begin` would raise."""
        return self._broken

    def abort(self, *, shards: bool = True) -> None:
        """Abort the step that waits for another process; it raises, as does every later one until
        `begin`.

        Callable from any thread. With `shards` False, the shards of this stage go on with each
        other, and all of them have to run the same steps to their end; what they wait for from
        another stage, or send to one, raises.
        """
        if shards or self._shards is None:
            self._aborted, self._broken = True, self._shards is not None
        for part in (self._source, self._sink, self._shards if shards else None):
            if part is not None:
                part.abort()

    def close(self) -> None:
        for part in (self._source, self._sink, self._shards):
            if part is not None:
                part.close()

    @contextlib.contextmanager
    def step(self, rows: list[Row]) -> Iterator[None]:
        """Surround each step, of `rows`, whose forwards receive and send.

        Raises: LostError for a shard or a stage that is gone.
        """
        if self._aborted:
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
    """Return gloo's message without the line of its source and its advice."""
    return re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]


ALONE = Neighbours()


def hidden_links(
    part: ModelPart, directory: Path
) -> tuple[HiddenReceiver | None, HiddenSender | None]:
    """Return this part's links from the stage before it and to the one after it.

    They are sockets in `directory`.

    Raises: MisuseError.
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
