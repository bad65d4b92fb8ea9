"""The real node of `kvflow bench peers`: a prefill with its own process.

    python -m kvflow.bench.crowd_node

Commands: setup, watch, watched, silent, rooms, tables, part, quit. Node, sockets and data plane are
those of the library.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import uvloop

from kvflow.bench.child import StallTicker, cpu_s, rss_kib, serve
from kvflow.bench.crowd_peers import PROMPT, small_layout
from kvflow.bench.crowds import allow_many_connections
from kvflow.memory.pool import PagedPool
from kvflow.node import PrefillNode
from kvflow.protocols.limits import Bounds
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.serve.launch.process import settle
from kvflow.transports.control.zmq import ZmqSocket, bind_router
from kvflow.transports.data.local import LocalPlane

POOL_PAGES = 4096
LOOK_S = 1.0


class CrowdNode:
    async def setup(self, *, peers: int) -> dict[str, Any]:
        allow_many_connections()
        settle()
        self._peers = peers
        self._pool = PagedPool.allocate(small_layout(POOL_PAGES))
        bounds = Bounds(targets=peers, decodes_per_address=peers, decodes_per_process=peers)
        self._node = PrefillNode(
            self._pool, LocalPlane(self._pool.segment), bounds=bounds, bind=self._bind
        )
        await self._node.start()
        return {
            "control": self._node.info.control,
            "incarnation": self._node.info.incarnation,
            "heartbeat_s": self._node.timing.heartbeat_s,
        }

    def _bind(self, host: str, port: int) -> tuple[ZmqSocket, int]:
        self._socket, bound = bind_router(host, port, decodes=self._peers)
        return self._socket, bound

    async def watch(self, *, stalls: bool = True) -> dict[str, Any]:
        """Begin to measure. Without `stalls`, no ticker takes CPU meanwhile."""
        self._ticker = StallTicker() if stalls else None
        self._cpu_s, self._begun_s = cpu_s(), time.perf_counter()
        return {}

    async def watched(self) -> dict[str, Any]:
        """End the measurement, and return stalls in ms, CPU seconds and the share of one core."""
        used_s, seconds = cpu_s() - self._cpu_s, time.perf_counter() - self._begun_s
        found = {} if self._ticker is None else self._ticker.stalls()
        return {**found, "cpu_s": round(used_s, 4), "cpu_share": round(used_s / seconds, 4)}

    async def silent(self, *, count: int, within_s: float) -> dict[str, Any]:
        """Wait until so many decodes count as silent."""
        peers = self._node.shell.endpoint.core.peers.values()
        for _ in range(round(within_s / LOOK_S)):
            # To look at every decode more often would count as the node's own work.
            if sum(peer.phase is PeerPhase.SILENT for peer in peers) >= count:
                return {}
            await asyncio.sleep(LOOK_S)
        raise TimeoutError(f"after {within_s:g} s fewer than {count} decodes are silent")

    async def rooms(self, *, first: int, count: int) -> dict[str, Any]:
        """Serve `count` rooms of one page, all at once."""
        async with asyncio.TaskGroup() as tasks:
            for room in range(first, first + count):
                tasks.create_task(self._serve(room))
                # An engine receives requests one by one, and not all in one turn of the loop.
                await asyncio.sleep(0)
        return {}

    async def _serve(self, number: int) -> None:
        node = self._node
        async with node.room(number, PROMPT) as room:
            await room.matched()
            pages = node.pages.take(1, "bench")
            room.send(pages, last=True, handoff=b"token")
            await room.done()
        node.pages.give_back(pages, "bench")

    async def tables(self) -> dict[str, Any]:
        """Return the number of entries in each table of the node, and its memory in KiB."""
        shell = self._node.shell
        core = shell.endpoint.core
        peers, former = core.peers.values(), core.former
        sizes = {
            "decodes": len(core.peers),
            "routes": len(shell.routes),
            "tasks": len(asyncio.all_tasks()),
            "connections": len(self._socket.connections.open),
            "rooms": len(core.rooms),
            "writes": len(core.writes),
            "deadlines": len(core.deadlines),
            "open grants": sum(len(peer.grants.rooms) for peer in peers),
            "remembered grants": sum(peer.grants.remembered for peer in peers),
            "announcements": len(core.rendezvous.announced),
            "refused decodes": len(core.refused),
            "displaced decodes": len(former.displaced),
            "parted decodes": len(former.parted),
            "decodes in doubt": len(former.in_doubt),
            "tasks queued": len(core.tasks),
        }
        return {"sizes": sizes, "rss_kib": rss_kib()}

    async def part(self) -> dict[str, Any]:
        begun = time.perf_counter()
        await self._node.close()
        return {"seconds": round(time.perf_counter() - begun, 3)}

    async def close(self) -> None:
        await self._node.close()
        self._pool.close()


if __name__ == "__main__":

    async def main() -> None:
        await serve(CrowdNode())

    sys.exit(uvloop.run(main()))
