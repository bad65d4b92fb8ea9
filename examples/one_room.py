"""One room between two nodes over your own arrays: no model, no HTTP, no torch.

    python examples/one_room.py

Prefill's arrays are plain numpy memory; decode's lie in shared memory, so that prefill can write
into them.
"""

import asyncio

import numpy as np

import kvflow

PAGES, PAGE_SIZE, HEADS, DIM = 64, 16, 2, 8
NAMES = ("layer.0.k", "layer.0.v")
PROMPT = list(range(100))  # token ids; both sides must mean the same ones


async def main() -> None:
    random = np.random.default_rng(0)
    mine = {
        name: random.standard_normal((PAGES, PAGE_SIZE, HEADS, DIM), dtype=np.float32)
        for name in NAMES
    }
    source = kvflow.PagedPool.wrap(mine, page_size=PAGE_SIZE)
    streams = [(name, "float32", (HEADS, DIM)) for name in NAMES]
    target = kvflow.PagedPool.allocate(
        kvflow.build_layout(streams, page_size=PAGE_SIZE, num_pages=PAGES)
    )

    async with (
        kvflow.PrefillNode(source, plane="local") as prefill,
        kvflow.DecodeNode(target, plane="local") as decode,
        prefill.room(7, PROMPT) as sending,
        decode.room(7, [prefill.info], PROMPT) as receiving,
    ):
        await sending.matched()  # decode has lent its pages
        pages = prefill.pages.take(source.layout.pages_for(len(PROMPT)), "my engine")
        sending.send(pages[:4])  # full pages may travel while the rest is computed
        sending.send(pages[4:], last=True, handoff=b"first token: 42")
        print(await receiving.landed())
        await sending.done()

        same = (target.array("layer.0.k")[receiving.pages] == mine["layer.0.k"][pages]).all()
        print(
            f"{len(pages)} pages, {source.layout.page_bytes * len(pages)} bytes, identical: {same}"
        )
        prefill.pages.give_back(pages, "my engine")
        for line in receiving.story():
            print(f"  {line.what:15} {line.phase:20} {line.text}")
    assert same and source.pages.at_rest() and target.pages.at_rest()


if __name__ == "__main__":
    asyncio.run(main())
