"""Both legs of one try, and the order in which they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from kvflow.http.errors import Failure
from kvflow.protocols.errors import Code
from kvflow.router.legs import Leg, PairFailedError, check
from kvflow.router.workers import Worker

ROOT_CAUSE_WAIT_S = 2.0


class Pair(Protocol):
    """Both legs of one try."""

    headers: Mapping[str, str]
    """Those that the client's answer gets from this try."""

    @property
    def decode(self) -> Leg:
        """The leg whose answer the client gets, once `answer` has returned."""

    @property
    def asked(self) -> Collection[Worker]:
        """The workers that it has asked."""

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        """Decode's stream once it has begun, or its complete answer. Raises: PairFailedError."""

    async def first(self) -> bytes:
        """A piece of decode's stream while there is no token in it yet. Raises: PairFailedError."""


class TogetherPair:
    """Both legs begin at once. The first failure ends the other leg."""

    def __init__(self, prefill: Leg, decode: Leg, headers: Mapping[str, str]) -> None:
        self.prefill, self.decode, self.headers = prefill, decode, headers
        self.asked = (prefill.worker, decode.worker)
        self._prefilling = asyncio.create_task(prefill.complete())
        self._decoding = asyncio.create_task(decode.begin())

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        """Decode's stream once it has begun, or its complete answer. Raises: PairFailedError."""
        await asyncio.wait([self._prefilling, self._decoding], return_when=asyncio.FIRST_COMPLETED)
        if not self._decoding.done():
            await self._check_prefill(self._decoding)
        answer = await self._decoding
        if isinstance(answer, web.Response):
            check(answer)
        return answer

    async def first(self) -> bytes:
        """A piece of decode's stream while there is no token in it yet: prefill's refusal ends the
        wait.

        Raises: PairFailedError.
        """
        reading = asyncio.create_task(self.decode.read())
        try:
            await asyncio.wait([self._prefilling, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._check_prefill(reading)
            return await reading
        finally:
            reading.cancel()

    async def _check_prefill(self, decode: asyncio.Task[Any]) -> None:
        """Prefill has answered: return when that was no refusal, or one that only follows from a
        failure of decode, whose own answer has arrived then. Raises: PairFailedError."""
        answer = self._prefilling.result()
        if answer.status != 499:
            check(answer)
            return
        await asyncio.wait([decode], timeout=ROOT_CAUSE_WAIT_S)
        if decode.done():
            return
        text = f"decode ended the room and gave no reason within {ROOT_CAUSE_WAIT_S:g} s"
        raise PairFailedError(Failure(502, str(Code.CLIENT_GONE), text))

    def close(self) -> None:
        """Close both connections.

        No await here: a failed write to a client that left is followed by the cancellation of its
        handler, which would end this at its first await and leave the legs open."""
        for leg, task in ((self.prefill, self._prefilling), (self.decode, self._decoding)):
            task.cancel()
            task.add_done_callback(leg.dispose)
            leg.close()


@asynccontextmanager
async def together(
    prefill: Leg, decode: Leg, headers: Mapping[str, str]
) -> AsyncGenerator[TogetherPair, None]:
    """Begin both legs; leaving closes both. `headers`: for the client's answer."""
    with prefill.worker.busy(), decode.worker.busy():
        pair = TogetherPair(prefill, decode, headers)
        try:
            yield pair
        finally:
            pair.close()


class SequentialPair:
    """Decode is asked once prefill has answered, with what that has answered; a prefill may be left
    out.
    """

    def __init__(self, prefill: Leg | None, ask_decode: Callable[[web.Response], Leg]) -> None:
        """`ask_decode`: from prefill's complete answer, or an empty one; it may raise
        PairFailedError.
        """
        self.headers: Mapping[str, str] = {}
        self._legs = [] if prefill is None else [prefill]
        self._prefill, self._ask_decode = prefill, ask_decode

    @property
    def decode(self) -> Leg:
        return self._legs[-1]

    @property
    def asked(self) -> Collection[Worker]:
        return [leg.worker for leg in self._legs]

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        """Raises: PairFailedError."""
        answer = web.Response()
        if self._prefill is not None:
            answer = await self._prefill.complete()
            check(answer)
        self._legs.append(self._ask_decode(answer))
        found = await self.decode.begin()
        if isinstance(found, web.Response):
            check(found)
        return found

    async def first(self) -> bytes:
        """Raises: PairFailedError."""
        return await self.decode.read()

    def close(self) -> None:
        """Close both connections. No await here, as in TogetherPair."""
        for leg in self._legs:
            leg.close()


@asynccontextmanager
async def sequential(
    prefill: Leg | None, decode: Worker, ask_decode: Callable[[web.Response], Leg]
) -> AsyncGenerator[SequentialPair, None]:
    """Leaving closes both legs.

    Prefill is counted as busy to the end: decode reads from it after its answer.
    """
    with prefill.worker.busy() if prefill is not None else nullcontext(), decode.busy():
        pair = SequentialPair(prefill, ask_decode)
        try:
            yield pair
        finally:
            pair.close()
