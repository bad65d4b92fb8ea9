"""The least that a room of one page can cost: a message, a bare write, and a message back.

Decode sends a message as long as a Bootstrap over bare ZMQ, and a thread of prefill answers it with
one as long as a ChunkDone after it has written the page with the data plane's bare calls. Both
threads block in ZMQ, and the writer spins until the page has landed. No event loop, no endpoint and
no page list takes part, and blocks are planned before the clock starts.

While that one thread writes, it cannot read an abort, and a vendor's engine may hold it for a
minute. A safe protocol writes in a thread of its own, so the exchanges also run in that way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
    """Prefill's end. `rooms` blocks; call it in a thread."""

    def __init__(self, writer: RawWriter) -> None:
        self._writer = writer
        self._socket = _socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.control = f"tcp://127.0.0.1:{port}"

    def rooms(self, pages: Sequence[PageIndices], *, apart: bool = False) -> None:
        """Answer one exchange for each list of pages, and write those pages; `apart`, in a thread
        that does nothing else.

        Raises: zmq.Again when a message does not come.
        """
        planned: list[Blocks] = [self._writer.plan(one) for one in pages]
        if not apart:
            self._answer(planned, self._writer.move)
            return
        with _in_thread(self._writer.move) as move:
            self._answer(planned, move)

    def _answer(self, planned: list[Blocks], move: Callable[[Blocks], None]) -> None:
        for blocks in planned:
            peer, _ = self._socket.recv_multipart()
            move(blocks)
            self._socket.send_multipart((peer, bytes(CHUNK_DONE_BYTES)))

    def close(self) -> None:
        self._socket.close(linger=0)


@contextmanager
def _in_thread(move: Callable[[Blocks], None]) -> Iterator[Callable[[Blocks], None]]:
    """Yield a function that has `move` called in another thread, and waits for it."""
    inbox: queue.SimpleQueue[Blocks | None] = queue.SimpleQueue()
    outbox: queue.SimpleQueue[None] = queue.SimpleQueue()

    def serve() -> None:
        while (blocks := inbox.get()) is not None:
            move(blocks)
            outbox.put(None)

    def hand_over(blocks: Blocks) -> None:
        inbox.put(blocks)
        outbox.get(timeout=PATIENCE_MS / 1000)

    thread = threading.Thread(target=serve, name="bare-write", daemon=True)
    thread.start()
    try:
        yield hand_over
    finally:
        inbox.put(None)
        thread.join()


def _socket(kind: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    # A peer that fails must not keep this process waiting for ever.
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    return socket
