"""Both legs of one try, and the order in which they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import aiohttp
from aiohttp import web

from kvflow.protocols.errors import Code
from kvflow.server.http.errors import Failure
from kvflow.server.router.legs import Leg, PairFailedError, check

ROOT_CAUSE_WAIT_S = 2.0


class Pair(Protocol):
    """Both legs of one try."""

    headers: Mapping[str, str]
    """Those that the client's answer gets from this try."""

    @property
    def decode(self) -> Leg:
        """The leg whose answer the client gets; only once `answer` has returned."""

    async def answer(self) -> aiohttp.ClientResponse | web.Response:
        """Decode's stream once it has begun, or its complete answer. Raises: PairFailedError."""

    async def first(self) -> bytes:
        """A piece of decode's stream while there is no token in it yet. Raises: PairFailedError."""


class TogetherPair:
    """Both legs begin at once. The first failure ends the other leg."""

    def __init__(self, prefill: Leg, decode: Leg, headers: Mapping[str, str]) -> None:
        self.prefill, self.decode, self.headers = prefill, decode, headers
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
        """A piece of decode's stream while there is no token in it yet: prefill's refusal ends the wait.

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
        """Prefill has answered: return when that was no refusal, or one that only follows from a failure of decode,
        whose own answer has arrived then. Raises: PairFailedError."""
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
        """Close both connections. No await here: a failed write to a client that left is followed by the cancellation
        of its handler, which would end this at its first await and leave the legs open."""
        for leg, task in ((self.prefill, self._prefilling), (self.decode, self._decoding)):
            task.cancel()
            task.add_done_callback(leg.dispose)
            leg.close()


@asynccontextmanager
async def together(prefill: Leg, decode: Leg, headers: Mapping[str, str]) -> AsyncGenerator[TogetherPair, None]:
    """Begin both legs; leaving closes both. `headers`: for the client's answer."""
    for leg in (prefill, decode):
        leg.worker.begin()
    pair = TogetherPair(prefill, decode, headers)
    try:
        yield pair
    finally:
        for leg in (prefill, decode):
            leg.worker.end()
        pair.close()
