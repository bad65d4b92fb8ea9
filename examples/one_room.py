"""One room between two nodes over your own tensors: no model, no HTTP. Run it: python examples/one_room.py

Prefill's tensors are plain torch tensors; decode's lie in shared memory, so that prefill can write into them.
"""

import asyncio

import torch

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.pages.layout import build_layout
from kvflow.transports.data.select import open_plane

PAGES, PAGE_SIZE, HEADS, DIM = 64, 16, 2, 8
PROMPT = list(range(100))  # token ids; both sides must mean the same ones


async def main() -> None:
    mine = {name: torch.randn(PAGES, PAGE_SIZE, HEADS, DIM) for name in ("layer.0.k", "layer.0.v")}
    source = PagedPool.over(mine, PAGE_SIZE)
    streams = [(name, "float32", (HEADS, DIM)) for name in mine]
    target = PagedPool.allocate(build_layout(streams, page_size=PAGE_SIZE, num_pages=PAGES))

    async with (
        PrefillNode(source, open_plane("local", source.segment)) as prefill,
        DecodeNode(target, open_plane("local", target.segment)) as decode,
        prefill.room(7, PROMPT) as sending,
        await decode.room(7, [prefill.info], PROMPT) as receiving,
    ):
        await sending.matched()  # decode has lent its pages
        pages = prefill.pages.take(source.layout.pages_for(len(PROMPT)), "my engine")
        sending.send(pages[:4])  # full pages may travel while the rest is computed
        sending.send(pages[4:], last=True, handoff=b"first token: 42")
        print(await receiving.landed())
        await sending.done()

        same = (source.pages_bytes(pages) == target.pages_bytes(receiving.pages)).all()
        print(f"{len(pages)} pages, {source.layout.page_bytes * len(pages)} bytes, identical: {same}")
        prefill.pages.give_back(pages, "my engine")
        for line in receiving.story():
            print(f"  {line.what:15} {line.phase:20} {line.text}")
    assert same and decode.pages.at_rest() and prefill.pages.at_rest()


if __name__ == "__main__":
    asyncio.run(main())
