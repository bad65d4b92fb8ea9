"""The demo's client of a fleet: it streams, aborts one transfer, and reads the roles' reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp
import msgspec

from kvflow.protocols.errors import KvflowError, TransferError

POLL_S = 0.005
AT_REST_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 60.0
ABORT_SHARE = 0.125  # share of a room's bytes that must land before the client disconnects


class DemoError(KvflowError):
    """The demo could not finish. The text is one line for the user."""


class Streamed(msgspec.Struct, kw_only=True):
    """One completion, with times that its client measured."""

    prompt: str
    text: str = ""
    output_ids: list[int] = []
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rate of the decode phase, in tokens per second."""
        # The first token is not counted, because it waits for prefill and the transfer.
        took_s = self.total_s - self.ttft_s
        return (len(self.output_ids) - 1) / took_s if took_s > 0 else 0.0


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """A room that was aborted during its transfer, with the reports of both sides."""

    room: int
    bytes_at_abort: int
    bytes_total: int
    sides: dict[str, Any]


class FleetClient:
    """A client of one fleet. It reaches the router, prefill and decode by their URLs."""

    def __init__(
        self, session: aiohttp.ClientSession, router: str, prefill: str, decode: str
    ) -> None:
        self.session, self.router, self.prefill, self.decode = session, router, prefill, decode

    async def get(self, url: str) -> Any:
        async with self.session.get(url) as answer:
            return msgspec.json.decode(await answer.read())

    async def complete(
        self, prompt: str, new_tokens: int, show: Callable[[str], None] | None = None
    ) -> Streamed:
        """Request exactly `new_tokens` greedy tokens. `show` gets new text. Raises: DemoError."""
        done = Streamed(prompt=prompt)
        started = time.perf_counter()
        body = {"text": prompt, "stream": True, "sampling_params": _greedy(new_tokens)}
        async with self.session.post(f"{self.router}/generate", json=body) as answer:
            async for event in events(answer):
                if not done.ttft_s:
                    done.ttft_s = time.perf_counter() - started
                # /generate is cumulative: every event repeats the text so far.
                if show is not None:
                    show(event["text"][len(done.text) :])
                done.text, done.output_ids = event["text"], event["output_ids"]
        done.total_s = time.perf_counter() - started
        return done

    async def pages_at_rest(self) -> bool:
        """Return True when every page of both pools is free, or False after `AT_REST_TIMEOUT_S`."""
        until = time.monotonic() + AT_REST_TIMEOUT_S
        while True:
            infos = [await self.get(f"{url}/server_info") for url in (self.prefill, self.decode)]
            if all(info["pages"]["home"] and not info["quarantine_pages"] for info in infos):
                return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(POLL_S)

    async def move(self, input_ids: list[int]) -> None:
        """Request a completion only to measure its transfer. Raises: DemoError."""
        await self._read({"input_ids": input_ids, "stream": True, "sampling_params": _greedy(1)})

    async def latest_room(self) -> dict[str, Any]:
        (line, *_) = (await self.get(f"{self.prefill}/rooms"))["rooms"]
        sides: dict[str, Any] = await self.get(f"{self.router}/rooms/{line['room']}")
        return sides

    async def moved(self) -> tuple[int, float]:
        """Return the bytes that landed in all rooms, and the seconds that the writes took."""
        total, seconds = 0, 0.0
        for line in (await self.get(f"{self.prefill}/rooms"))["rooms"]:
            story = await self.get(f"{self.prefill}/rooms/{line['room']}")
            total += story["bytes_landed"]
            seconds += _writing_s(story["events"])
        return total, seconds

    async def abort_in_mid_transfer(self, input_ids: list[int]) -> Aborted:
        """Request a completion, and disconnect once some of its bytes land.

        Raises: DemoError if the request fails; TransferError if it ends before it can be aborted.
        """
        body = {"input_ids": input_ids, "stream": True, "sampling_params": _greedy(8)}
        request = asyncio.create_task(self._read(body))
        try:
            room = await self._moving_room(request)
        finally:
            # Cancelling the task closes the connection. The router sees a client that disconnected.
            request.cancel()
            await asyncio.wait([request])
        async with asyncio.timeout(AT_REST_TIMEOUT_S):
            line = await self.get(f"{self.prefill}/rooms/{room}")
            # Slices under way may still land, so the number of bytes is final only after the drain.
            while not line["ended"] or line["phase"] == "draining":
                await asyncio.sleep(POLL_S)
                line = await self.get(f"{self.prefill}/rooms/{room}")
        sides = await self.get(f"{self.router}/rooms/{room}")
        return Aborted(
            room=room,
            bytes_at_abort=line["bytes_landed"],
            bytes_total=line["bytes_total"],
            sides=sides,
        )

    async def _moving_room(self, request: asyncio.Task[None]) -> int:
        async with asyncio.timeout(ABORT_TIMEOUT_S):
            while not request.done():
                for line in (await self.get(f"{self.prefill}/rooms"))["rooms"]:
                    if (
                        not line["ended"]
                        and line["bytes_landed"] > line["bytes_total"] * ABORT_SHARE
                    ):
                        return int(line["room"])
                await asyncio.sleep(POLL_S)
        # If the request failed, this raises its error.
        request.result()
        raise TransferError("the request ended before it could be aborted in mid-transfer")

    async def _read(self, body: dict[str, Any]) -> None:
        async with self.session.post(f"{self.router}/generate", json=body) as answer:
            async for _ in events(answer):
                pass


def _writing_s(events: list[dict[str, Any]]) -> float:
    """Return the seconds during which at least one chunk of the room was queued or written."""
    open_chunks, since_s, total_s = 0, 0.0, 0.0
    for event in events:
        if event["what"] == "chunk_queued":
            since_s = since_s if open_chunks else event["at_s"]
            open_chunks += 1
        elif event["what"] == "write_ended" and open_chunks:
            open_chunks -= 1
            total_s += 0.0 if open_chunks else event["at_s"] - since_s
    return total_s


def _greedy(new_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


async def events(answer: aiohttp.ClientResponse) -> AsyncGenerator[Any, None]:
    """Yield the JSON events of a stream. Raises: DemoError for an error status or event."""
    if answer.status != 200:
        raise DemoError(
            f"the router answered {answer.status}: "
            f"{(await answer.read())[:300].decode(errors='replace')}"
        )
    async for line in answer.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            raise DemoError(f"the stream ended in an error: {event['error']['message']}")
        yield event
