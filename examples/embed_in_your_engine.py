"""kvflow under an engine of your own: your tensors, your scheduler, our rooms.

    python examples/embed_in_your_engine.py

Everything an engine has to write stands in the two functions below; the rest pretends to be an
engine.
"""

import asyncio

import torch

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import KvflowError
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.transports.data.select import open_plane

LAYERS, HEADS, DIM, PAGE_SIZE, PAGES, CHUNK_PAGES = 4, 2, 8, 16, 128, 2


# --- what you write: about 25 lines
async def prefill_request(
    node: PrefillNode, engine: "YourEngine", room: int, prompt: list[int]
) -> None:
    pages = node.pages.take(node.pool.layout.pages_for(len(prompt)), room)
    try:
        async with node.room(room, prompt) as session:
            await session.matched()
            for start in range(0, len(pages), CHUNK_PAGES):
                chunk, last = pages[start : start + CHUNK_PAGES], start + CHUNK_PAGES >= len(pages)
                # The previous chunk is on its way meanwhile.
                await asyncio.to_thread(engine.compute, chunk)
                session.send(chunk, last=last, handoff=b"42" if last else b"")
            await session.done()
    finally:
        node.pages.give_back(pages, room)  # deferred by itself while a write still reads them


async def decode_request(
    node: DecodeNode, room: int, ranks: list[RankInfo], prompt: list[int]
) -> int:
    async with await node.room(room, ranks, prompt) as session:
        first_token = int(await session.landed())
        pages = session.keep(owner=room)  # they are the engine's now, like pages it took itself
    print(
        f"room {room}: {len(prompt)} tokens landed on pages {pages.tolist()}, first token "
        f"{first_token}"
    )
    node.pages.give_back(pages, room)
    return first_token


# --- what you have already
class YourEngine:
    """Layer-first tensors [pages, slots, heads, dim], as most engines keep them."""

    def __init__(self) -> None:
        shape = (PAGES, PAGE_SIZE, HEADS, DIM)
        self.tensors = {f"layer.{i}.{x}": torch.zeros(shape) for i in range(LAYERS) for x in "kv"}

    def compute(self, pages: object) -> None:
        for tensor in self.tensors.values():
            tensor[torch.as_tensor(pages, dtype=torch.long)] = torch.randn(DIM)


async def main() -> None:
    engine = YourEngine()
    source = PagedPool.wrap(engine.tensors, PAGE_SIZE)
    streams: list[tuple[str, str, tuple[int, ...]]] = [
        (name, "float32", (HEADS, DIM)) for name in engine.tensors
    ]
    # page-first: fewer blocks.
    target = PagedPool.allocate(build_layout(streams, page_size=PAGE_SIZE, num_pages=PAGES))
    async with (
        PrefillNode(source, open_plane("local", source.segment)) as prefill,
        DecodeNode(target, open_plane("local", target.segment)) as decode,
    ):
        prompts = [list(range(n)) for n in (1, 16, 17, 100, 333)]
        sent = [
            prefill_request(prefill, engine, room, prompt) for room, prompt in enumerate(prompts)
        ]
        received = [
            decode_request(decode, room, [prefill.info], prompt)
            for room, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*sent, *received)

        # A decode that asks for another prompt than the one prefill was given learns it at once.
        try:
            await asyncio.gather(
                prefill_request(prefill, engine, 9, [1, 2, 3]),
                decode_request(decode, 9, [prefill.info], [1, 2, 4]),
            )
        except KvflowError as error:
            print(f"room 9 failed on both sides: {error}")
    assert source.pages.at_rest() and target.pages.at_rest()


if __name__ == "__main__":
    asyncio.run(main())
