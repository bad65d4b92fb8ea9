"""Pairs: both legs of one try, and the order in which they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, closing, nullcontext
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
    """Headers that this try adds to the client's answer."""

    @property
    def decode(self) -> Leg:
        """The leg whose answer the client gets. Valid once `answer` returns."""

    @property
    def asked(self) -> Collection[Worker]:
        """Workers to which this try has sent a request."""

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        """Return decode's stream once it begins, or its whole answer. Raises: PairFailedError."""

    async def first(self) -> bytes:
        """Return the next piece of decode's stream. Call this only until the first token.

        Raises: PairFailedError.
        """


class TogetherPair:
    """A try in which both legs begin at once. If one fails, the other is closed."""

    def __init__(self, prefill: Leg, decode: Leg, headers: Mapping[str, str]) -> None:
        self.prefill, self.decode, self.headers = prefill, decode, headers
        self.asked = (prefill.worker, decode.worker)
        self._prefilling = asyncio.create_task(prefill.complete())
        self._decoding = asyncio.create_task(decode.begin())

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        await asyncio.wait([self._prefilling, self._decoding], return_when=asyncio.FIRST_COMPLETED)
        if not self._decoding.done():
            await self._check_prefill(self._decoding)
        answer = await self._decoding
        if isinstance(answer, web.Response):
            check(answer)
        return answer

    async def first(self) -> bytes:
        reading = asyncio.create_task(self.decode.read())
        try:
            await asyncio.wait([self._prefilling, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await self._check_prefill(reading)
            return await reading
        finally:
            reading.cancel()

    async def _check_prefill(self, decode: asyncio.Task[Any]) -> None:
        """Check prefill's complete answer.

        If prefill refused because decode had ended the room, return once the `decode` task is done:
        its result has the cause.

        Raises: PairFailedError.
        """
        answer = self._prefilling.result()
        # Status 499 means that decode ended the room. Decode's answer, which may still be on its
        # way, has the cause.
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

        This function must not await. When a write fails because the client disconnected, aiohttp
        cancels the handler. An await would then raise at once and leave the legs open.
        """
        for leg, task in ((self.prefill, self._prefilling), (self.decode, self._decoding)):
            task.cancel()
            task.add_done_callback(leg.dispose)
            leg.close()


@asynccontextmanager
async def together(
    prefill: Leg, decode: Leg, headers: Mapping[str, str]
) -> AsyncGenerator[TogetherPair, None]:
    """Begin both legs, and close both on exit. `headers` are for the client's answer."""
    with (
        prefill.worker.busy(),
        decode.worker.busy(),
        closing(TogetherPair(prefill, decode, headers)) as pair,
    ):
        yield pair


class SequentialPair:
    """A try that asks prefill first, and then uses prefill's answer to ask decode.

    Without a prefill, `ask_decode` gets an empty answer. `ask_decode` may raise PairFailedError.
    """

    def __init__(self, prefill: Leg | None, ask_decode: Callable[[web.Response], Leg]) -> None:
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
        return await self.decode.read()

    def close(self) -> None:
        """Close both connections without an await: see `TogetherPair.close`."""
        for leg in self._legs:
            leg.close()


@asynccontextmanager
async def sequential(
    prefill: Leg | None, decode: Worker, ask_decode: Callable[[web.Response], Leg]
) -> AsyncGenerator[SequentialPair, None]:
    """Open the pair, and close both legs on exit.

    Prefill counts as busy until then, because decode reads prefill's pages after prefill answers.
    """
    busy = nullcontext() if prefill is None else prefill.worker.busy()
    with busy, decode.busy(), closing(SequentialPair(prefill, ask_decode)) as pair:
        yield pair
