"""Two engines that are plain loops, with page allocators of their own and no event loop.

    python examples/sync_engine.py

Prefill computes a page per step and sends what is ready; decode lends its own pages and gets them
back when nothing can write into them any more. Each has its node in a thread; here both engines are
threads of one process.
"""

import threading
from collections import deque

import numpy as np

import kvflow

PAGES, PAGE_SIZE, HEADS, DIM = 64, 16, 2, 8
REQUESTS = {
    room: list(range(room, room + tokens)) for room, tokens in ((1, 100), (2, 16), (3, 250))
}


class Request:
    def __init__(self, room: int, prompt: list[int], pages: list[int]) -> None:
        self.room, self.prompt, self.pages = room, prompt, pages
        self.computed = self.sent = 0  # pages


class Engine:
    """The half that has nothing to do with kvflow: free pages, and the requests that run."""

    def __init__(self, pool: kvflow.PagedPool) -> None:
        self.pool, self.free = pool, deque(range(PAGES))

    def begin(self, room: int, prompt: list[int], *, cached_tokens: int = 0) -> Request:
        needed = self.pool.layout.pages_for(len(prompt)) - cached_tokens // PAGE_SIZE
        return Request(room, prompt, [self.free.popleft() for _ in range(needed)])

    def finish(self, request: Request) -> None:
        self.free.extend(request.pages)


class PrefillEngine(Engine):
    def run(self, node: kvflow.PrefillThread, requests: dict[int, list[int]]) -> None:
        rooms = {}
        for number, prompt in requests.items():
            rooms[number] = node.open(number, prompt=prompt, context=self.begin(number, prompt))
        while rooms:
            for room in rooms.values():
                self.step(room.context)
                self.send(room)
            for event in node.poll(timeout_s=0.001):
                if event.kind == "failed":
                    print(f"prefill: room {event.room.room} failed: {event.error}")
                elif event.kind == "released":  # nothing reads its pages any more
                    self.finish(event.room.context)
                    del rooms[event.room.room]

    def step(self, request: Request) -> None:
        """Compute one page: K is a function of the token, as far as this example goes."""
        if request.computed < len(request.pages):
            first = request.computed * PAGE_SIZE
            tokens = np.array(request.prompt[first : first + PAGE_SIZE], np.float32)
            page = request.pages[request.computed]
            self.pool.array("k")[page, : len(tokens)] = tokens[:, None, None]
            request.computed += 1

    def send(self, room: kvflow.PrefillThreadRoom) -> None:
        request: Request = room.context
        if room.matched and room.error is None and not room.last_sent:
            # Pages that decode has in its own cache.
            skipped = (room.prefix_tokens or 0) // PAGE_SIZE
            ready = request.pages[max(request.sent, skipped) : request.computed]
            last = request.computed == len(request.pages)
            if ready or last:
                room.send(ready, last=last, handoff=b"first token: 42" if last else b"")
                request.sent = request.computed


class DecodeEngine(Engine):
    def run(
        self, node: kvflow.DecodeThread, prefill: str, requests: dict[int, list[int]], cached: int
    ) -> None:
        rooms = {}
        for number, prompt in requests.items():
            # As if the first page stood in this engine's prefix cache.
            prefix = cached if len(prompt) > cached else 0
            request = self.begin(number, prompt, cached_tokens=prefix)
            rooms[number] = node.open(
                number,
                prefill=prefill,
                prompt=prompt,
                pages=request.pages,
                prefix_tokens=prefix,
                context=request,
            )
        while rooms:
            for event in node.poll(timeout_s=0.001):
                room = event.room
                if event.kind == "landed":
                    self.check(room.context, event.handoff)
                elif event.kind == "failed":
                    # Its pages are not free yet.
                    print(f"decode: room {room.room} failed: {event.error}")
                elif event.kind == "released":
                    self.finish(room.context)
                    del rooms[room.room]

    def check(self, request: Request, handoff: bytes) -> None:
        tokens = np.array(request.prompt, np.float32)
        found = self.pool.array("k")[request.pages].reshape(-1, HEADS, DIM)
        # Without the prefix, without the page's rest.
        expected = tokens[-(len(found) - -len(tokens) % PAGE_SIZE) :]
        identical = bool((found[: len(expected)] == expected[:, None, None]).all())
        print(
            f"room {request.room}: {len(request.pages)} pages, {handoff.decode()}, identical: "
            f"{identical}"
        )
        assert identical


def main() -> None:
    layout = kvflow.build_layout(
        [("k", "float32", (HEADS, DIM))], page_size=PAGE_SIZE, num_pages=PAGES
    )
    source = kvflow.PagedPool.wrap(
        {"k": np.zeros((PAGES, PAGE_SIZE, HEADS, DIM), np.float32)}, page_size=PAGE_SIZE
    )
    target = kvflow.PagedPool.allocate(layout)  # shared memory, so that prefill can write into it
    prefills, decodes = PrefillEngine(source), DecodeEngine(target)
    resolve = kvflow.RegistryClient().resolve
    with (
        kvflow.PrefillThread(source, "local", registry_port=0) as prefill,
        kvflow.DecodeThread(target, "local", resolve=resolve) as decode,
    ):
        computing = threading.Thread(target=prefills.run, args=(prefill, REQUESTS))
        computing.start()
        decodes.run(decode, prefill.registry, REQUESTS, cached=PAGE_SIZE)
        computing.join()
        assert prefill.wait_released(range(PAGES), timeout_s=5) and decode.wait_released(
            range(PAGES), timeout_s=5
        )
    assert len(prefills.free) == len(decodes.free) == PAGES
    print("every page is free again")


if __name__ == "__main__":
    main()
