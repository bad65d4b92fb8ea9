"""A process of clients that stream completions from one server with as little CPU time as possible.

On a machine with few cores, clients take CPU time away from the server. So a client only stores
bytes while streams run, and decodes them after all streams end.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

from kvflow.bench.child import serve

PATHS = {"generate": "/generate", "completions": "/v1/completions"}


class StreamFailedError(Exception):
    """Raised if an answer is not a complete stream of events."""


class StreamCommands:
    async def stream(
        self,
        url: str,
        api: str,
        prompts: list[list[int]],
        new_tokens: int,
        sampling: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Run one stream for each prompt, all at once. Times count from the opening of the gate.

        `sampling` has more parameters of the API.
        """
        # All connections open before the first request, so that no time includes connecting.
        gate = asyncio.Event()
        streams = [Stream(url, api, prompt, new_tokens, sampling or {}) for prompt in prompts]
        running = [asyncio.create_task(one.run(gate)) for one in streams]
        await asyncio.gather(*(one.connected.wait() for one in streams))
        begun = time.perf_counter()
        gate.set()
        await asyncio.gather(*running)
        firsts = [one.first_at - begun for one in streams]
        ends = [one.ended_at - begun for one in streams]
        return {
            "seconds": max(ends),
            "first_s": sorted(firsts)[len(firsts) // 2],
            "after_first_s": max(ends) - max(firsts),
            "tokens": [one.tokens() for one in streams],
        }

    async def close(self) -> None:
        return None


class Stream:
    def __init__(
        self, url: str, api: str, prompt: list[int], new_tokens: int, sampling: dict[str, Any]
    ) -> None:
        self._url, self._api = urlsplit(url), api
        self._body = _body(api, prompt, new_tokens, sampling)
        self._pieces: list[bytes] = []
        self.connected = asyncio.Event()
        self.first_at = self.ended_at = 0.0

    async def run(self, gate: asyncio.Event) -> None:
        try:
            reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        # `stream` waits for this event even if the connection fails. It sees the error later.
        finally:
            self.connected.set()
        try:
            await gate.wait()
            head = (
                f"POST {PATHS[self._api]} HTTP/1.1\r\nHost: {self._url.netloc}\r\nContent-Type: "
                "application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(self._body)}\r\n\r\n"
            )
            writer.write(head.encode() + self._body)
            while piece := await reader.read(1 << 16):
                if not self.first_at and b"data: {" in piece:
                    self.first_at = time.perf_counter()
                self._pieces.append(piece)
            self.ended_at = time.perf_counter()
        finally:
            writer.close()

    def tokens(self) -> int | list[int]:
        """Return the token ids, or their number if the API sends no ids.

        Raises: StreamFailedError.
        """
        head, _, rest = b"".join(self._pieces).partition(b"\r\n\r\n")
        text = unchunked(rest)
        events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")]
        if (
            b" 200 " not in head[:16]
            or not events
            or not text.endswith(b"data: [DONE]\n\n")
            or "error" in events[-1]
        ):
            raise StreamFailedError(
                f"the answer is not a whole stream: {(head + text[-200:])[:600]!r}"
            )
        if self._api == "generate":
            ids: list[int] = events[-1]["output_ids"]
            return ids
        count: int = events[-1]["usage"]["completion_tokens"]
        return count


def _body(api: str, prompt: list[int], new_tokens: int, sampling: dict[str, Any]) -> bytes:
    given: dict[str, Any] = {"temperature": 0, "ignore_eos": True, **sampling}
    if api == "generate":
        given["max_new_tokens"] = new_tokens
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": given}
    else:
        usage = {"stream_options": {"include_usage": True}}
        body = {**given, "prompt": prompt, "max_tokens": new_tokens, **usage}
    return json.dumps({**body, "stream": True}).encode()


def unchunked(body: bytes) -> bytes:
    """Return the content of a chunked HTTP body. Raises: StreamFailedError."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        try:
            size = int(body[at:end], 16)
        except ValueError:
            raise StreamFailedError(
                f"no chunk size at byte {at} of {len(body)}: {body[at : at + 40]!r}"
            ) from None
        if end < 0 or not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size


if __name__ == "__main__":
    asyncio.run(serve(StreamCommands()))
