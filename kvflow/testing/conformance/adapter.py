"""Adapters. Each one opens data planes of one kind for the suite, and states what they can do."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import Mapping

from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.ports import DataPlane
from kvflow.transports.data.fake import FakeNetwork, FakePlane, FakeWrite
from kvflow.transports.data.select import PLANES, UNFENCED, check_plane, open_plane

QUESTIONS = ("What status means landed?", "Can a write outlive its error?", "What fences a peer?")


class NotRunError(Exception):
    """Raised when a check cannot run on this plane or machine. The text is the reason."""


class Adapter:
    """The base class of adapters. Override `open`, and each default that is wrong for the plane."""

    name = ""
    host = "127.0.0.1"  # the address at which peers reach its planes
    between_processes = True
    """True if its planes reach other processes on this machine. The peers in checks are then
    processes, which the suite kills and freezes.
    """
    death_is_proof = True
    """True if `fence` returns after a writer on this machine has died.

    If this is False, `fence` must raise TransferError at once. The unproven pages of a dead writer
    then stay in quarantine.
    """
    limits_rate = True
    """True if its planes obey the rate that `open` receives."""

    def unavailable_reason(self) -> str:
        """Return the reason why its planes cannot run here; empty if they can."""
        return ""

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        """Open a plane for `pool`. The suite calls `export` itself.

        The pool is in shared memory (`pool.segment`). `rate_bytes_per_s` limits what the plane
        sends. The suite calls this in each process, possibly before that process's event loop runs.
        """
        raise NotImplementedError

    def under_way(self, plane: DataPlane) -> Mapping[str, int]:
        """Return how many resources the plane and its transfer engine keep for writes, by kind
        (handles, descriptors or notifications, for example).

        Each number must be 0 when no write runs.
        """
        return dict(getattr(plane, "under_way", {}))

    def kill(self, plane: DataPlane) -> None:
        """Stop a plane as if its process died. Called only if `between_processes` is False.

        Raises: NotRunError if the plane does not support it.
        """
        raise NotRunError("its planes live within one process, which would die too")

    def answers(self, plane: DataPlane) -> dict[str, str]:
        """Return the plane's answers to the three `QUESTIONS`, from the docstring of its module.

        One paragraph of the docstring must contain the questions, each with its answer. The answer
        to a missing question is empty.
        """
        written = inspect.getdoc(inspect.getmodule(type(plane))) or ""
        text = next(
            (" ".join(part.split()) for part in written.split("\n\n") if QUESTIONS[0] in part), ""
        )
        return {question: _answer(question, text) for question in QUESTIONS}


def _answer(question: str, text: str) -> str:
    # The answer ends at the next question.
    others = "|".join(re.escape(other) for other in QUESTIONS if other != question)
    found = re.search(rf"{re.escape(question)} +(.+?)(?: (?:{others})|$)", text)
    return found[1].strip() if found else ""


class NamedAdapter(Adapter):
    """An adapter for one of kvflow's own planes, given by its name."""

    def __init__(self, name: str) -> None:
        self.name, self.death_is_proof = name, name not in UNFENCED

    def unavailable_reason(self) -> str:
        try:
            check_plane(self.name)
        except MisuseError as error:
            return str(error)
        return ""

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        return open_plane(self.name, pool.segment, rate_bytes_per_s, self.host)


class FakeAdapter(Adapter):
    """An adapter for `kvflow.transports.data.fake`, a plane for tests within one process."""

    name = "fake"
    between_processes = False
    limits_rate = False

    def __init__(self) -> None:
        self._network = FakeNetwork()

    def open(self, pool: PagedPool, rate_bytes_per_s: float | None) -> DataPlane:
        if rate_bytes_per_s is None:
            return FakePlane(self._network)
        return _SlowFake(self._network, rate_bytes_per_s)

    def under_way(self, plane: DataPlane) -> Mapping[str, int]:
        assert isinstance(plane, FakePlane)
        return {"writes": len(plane.writes)}

    def kill(self, plane: DataPlane) -> None:
        assert isinstance(plane, FakePlane)
        plane.die()


class _SlowFake(FakePlane):
    def __init__(self, network: FakeNetwork, rate: float) -> None:
        super().__init__(network)
        self._rate = rate

    def began(self, write: FakeWrite) -> None:
        asyncio.get_running_loop().call_soon(self._move_on, write)

    def _move_on(self, write: FakeWrite) -> None:
        if not write.done.done():
            write.move(write.page_bytes)
            asyncio.get_running_loop().call_later(
                write.page_bytes / self._rate, self._move_on, write
            )


def load_adapter(text: str) -> Adapter:
    """Return an adapter. `text` is the name of a kvflow plane, or "module:factory" for your own.

    The factory, such as an `Adapter` class, is called without arguments.

    Raises: MisuseError if there is no such name or factory, or if the factory returns anything but
    an `Adapter`.
    """
    if text == FakeAdapter.name:
        return FakeAdapter()
    if text in PLANES:
        return NamedAdapter(text)
    module, colon, factory = text.partition(":")
    if not colon:
        names = ", ".join((*PLANES, FakeAdapter.name))
        raise MisuseError(
            f"no plane {text!r}; there are {names}; one of your own is module:factory"
        )
    try:
        made = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        raise MisuseError(f"plane {text!r}: {error}") from error
    if not isinstance(made, Adapter):
        raise MisuseError(
            f"plane {text!r} makes a {type(made).__name__}, not a "
            "kvflow.testing.conformance.Adapter"
        )
    made.name = made.name or text
    return made
