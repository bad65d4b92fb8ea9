"""The least that a room of one page can cost: a message, a bare write, and a message back.

Decode sends a message as long as a Bootstrap over bare ZMQ, and a thread of prefill answers it with
one as long as a ChunkDone after it has written the page with the data plane's bare calls. Both
threads block in ZMQ. No event loop, no endpoint and no page list takes part, and blocks are planned
before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from kvflow.bench.raw import RawWriter
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.pages.plan import Blocks

BOOTSTRAP_BYTES, CHUNK_DONE_BYTES = 68, 40
PATIENCE_MS = 20_000


class BareDecode:
    """Decode's end. Blocks; call it in a thread."""

    def __init__(self, control: str) -> None:
        self._socket = _socket(zmq.DEALER)
        self._socket.connect(control)

    def rooms(self, count: int) -> list[float]:
        """Run `count` exchanges, one after the other, and return the seconds of each.

        Raises: zmq.Again when an answer does not come.
        """
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self._socket.send(bytes(BOOTSTRAP_BYTES))
            self._socket.recv()
            seconds.append(time.perf_counter() - start)
        return seconds

    def close(self) -> None:
        self._socket.close(linger=0)


class BarePrefill:
    """Prefill's end. `rooms` and `tune` block; call them in a thread."""

    def __init__(self, writer: RawWriter) -> None:
        self._writer = writer
        self._socket = _socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.control = f"tcp://127.0.0.1:{port}"

    def rooms(self, pages: Sequence[PageIndices]) -> None:
        """Answer one exchange for each list of pages, and write those pages.

        Raises: zmq.Again when a message does not come.
        """
        planned: list[Blocks] = [self._writer.plan(one) for one in pages]
        for blocks in planned:
            peer, _ = self._socket.recv_multipart()
            self._writer.move(blocks)
            self._socket.send_multipart((peer, bytes(CHUNK_DONE_BYTES)))

    def close(self) -> None:
        self._socket.close(linger=0)


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    # A peer that fails must not keep this process waiting for ever.
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    return socket
