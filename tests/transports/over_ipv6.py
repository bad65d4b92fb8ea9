"""One room over ::1, in a separate process: python -m tests.transports.over_ipv6 local|mooncake"""

from __future__ import annotations

import asyncio
import sys

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.testing.pair import small_layout


async def move_one_room(prefill: PrefillNode, decode: DecodeNode) -> None:
    source = prefill.room(1, range(16))
    async with decode.room(1, [prefill.info], range(16)) as target:
        await source.matched()
        mine = prefill.pages.take(len(target.pages), "engine")
        source.send(mine, last=True)
        await target.landed()
    prefill.pages.give_back(mine, "engine")


async def main(plane: str) -> None:
    pools = [PagedPool.allocate(small_layout()) for _ in range(2)]
    async with (
        asyncio.timeout(20),
        PrefillNode(pools[0], plane, host="::1") as prefill,
        DecodeNode(pools[1], plane, host="::1") as decode,
    ):
        assert prefill.info.control.startswith("tcp://[::1]:"), prefill.info
        await move_one_room(prefill, decode)
    for pool in pools:
        pool.close()
    print("landed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
