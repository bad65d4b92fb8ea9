"""Prefill and decode nodes over your own paged pool. A node combines endpoint, shell, page store,
data plane and control link.

async with DecodeNode(pool, plane="local") as decode:
    # ranks: each prefill node's `info`
    async with decode.room(7, prefill=ranks, prompt=ids) as room:
        handoff = await room.landed()  # room.pages are filled

async with PrefillNode(pool, plane="local") as prefill:
    async with prefill.room(7, prompt=ids) as room:
        await room.matched()
        room.send(pages, last=True, handoff=b"...")
        await room.done()
"""

from __future__ import annotations

from kvflow.node.decode import DecodeNode
from kvflow.node.prefill import PrefillNode

__all__ = ["DecodeNode", "PrefillNode"]
