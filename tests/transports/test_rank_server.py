"""Two nodes of the bare library find each other over the registry that needs no HTTP server."""

from __future__ import annotations

import numpy as np

import kvflow


async def test_a_decode_finds_a_prefill_by_the_registrys_address() -> None:
    segment = kvflow.SharedSegment.create(4096)
    inside = np.frombuffer(segment.memory, np.uint8, 128).reshape(8, 4, 4)
    source = kvflow.PagedPool.wrap(
        {"k": np.arange(128, dtype=np.uint8).reshape(8, 4, 4)}, page_size=4
    )
    target = kvflow.PagedPool.wrap({"k": inside}, page_size=4, segment=segment)
    table = kvflow.RankTable()
    async with (
        kvflow.PrefillNode(source, plane="local") as prefill,
        kvflow.serve_ranks(table, "127.0.0.1", api_key="sesame") as port,
        kvflow.DecodeNode(
            target, plane="local", resolve=kvflow.RegistryClient("sesame").resolve
        ) as decode,
    ):
        table.put(prefill.info)
        async with (
            prefill.room(3, [1, 2, 3]) as sending,
            decode.room(3, f"127.0.0.1:{port}", [1, 2, 3]) as receiving,
        ):
            await sending.matched()
            page = prefill.pages.take(1, "test")
            sending.send(page, last=True)
            await receiving.landed()
            assert inside[receiving.pages].tolist() == source.array("k")[page].tolist()
            await sending.done()
        prefill.pages.give_back(page, "test")
    segment.close()
