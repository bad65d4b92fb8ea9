"""`kvflow bench peers`: one real prefill node and thousands of emulated decodes.

The decodes share one process. They register, send heartbeats, lend pages for rooms, vanish, come
back as new incarnations and say goodbye. The bench reports the node's stalls and CPU in each stage,
its memory per decode, and the size of each of its tables.

What idle decodes cost is reported twice. At rest, it is the CPU of the node above that of the same
node before the first one registered. This includes what the machine takes to wake a process that
sleeps, which can be more than the work itself. Beside other work, which keeps the node awake, it is
the CPU per heartbeat when all decodes send one at once, at the rate of idle decodes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvflow.bench.figures import Say
from kvflow.bench.pair import Process
from kvflow.protocols.limits import Bounds

NODE, PEERS = "kvflow.bench.crowd_node", "kvflow.bench.crowd_peers"
MUST_STALL_MS, MUST_CPU_SHARE, MUST_REGISTER_S = 5.0, 0.02, 10.0
ROOMS_AT_ONCE = 500
RACK = 10  # a rack is one of so many
SETTLE_S, LOST_S = 3.0, 10.0
PATIENCE_S = 90.0

Figures = dict[str, Any]


class _Stages:
    """The two processes, and the figures of the stages so far."""

    def __init__(self, node: Process, crowd: Process, say: Say) -> None:
        self.node, self.crowd, self._say = node, crowd, say
        self.figures: Figures = {}

    async def stage(self, name: str, work: Any) -> Figures:
        """Run `work` while the node is watched. Its reply stands beside the node's figures."""
        before = (await self.crowd.ask("figures"))["cpu_s"]
        await self.node.ask("watch")
        found = await work or {}
        seen = await self.node.ask("watched")
        tables = await self.node.ask("tables")
        spent = (await self.crowd.ask("figures"))["cpu_s"] - before
        figures = {**found, **seen, **tables, "crowd_cpu_s": round(spent, 2)}
        self.figures[name] = figures
        self._say(
            f"{name}: stall p99 {seen['stall_p99_ms']} ms, max {seen['stall_max_ms']} ms, "
            f"{100 * seen['cpu_share']:.1f} % of a core"
        )
        return figures

    async def rest(self, name: str, seconds: float, stalls_s: float) -> None:
        """Watch the node for `seconds` while nothing is done, and then its stalls for `stalls_s`.

        The ticker that finds stalls takes more CPU than thousands of idle decodes. So `resting_cpu`
        is the share of a core in the first part, which has no ticker.
        """
        await self.node.ask("watch", stalls=False)
        await asyncio.sleep(seconds)
        share = (await self.node.ask("watched"))["cpu_share"]
        self._say(f"{name}, without the ticker: {100 * share:.1f} % of a core")
        figures = await self.stage(name, asyncio.sleep(stalls_s))
        figures["resting_cpu"] = share

    async def heartbeats(self) -> float:
        """Return the CPU seconds that the node takes per heartbeat when all decodes send one."""
        await self.crowd.ask("beat", on=False)
        await self.node.ask("watch", stalls=False)
        beats = int((await self.crowd.ask("beat_once"))["beats"])
        used_s = float((await self.node.ask("watched"))["cpu_s"])
        await self.crowd.ask("beat", on=True)
        self._say(f"{beats} heartbeats at once: {1e6 * used_s / beats:.0f} us of CPU each")
        return used_s / beats

    async def lose(self, count: int, silent: int = 0) -> Figures:
        """Let decodes vanish. Wait for `SETTLE_S`, or until the node counts `silent` decodes as
        silent.
        """
        begun = time.monotonic()
        await self.crowd.ask("vanish", count=count)
        if not silent:
            return await asyncio.sleep(SETTLE_S, {})
        await self.node.ask("silent", count=silent, within_s=PATIENCE_S)
        return {"noticed_s": round(time.monotonic() - begun, 1)}

    async def rooms(self, count: int) -> Figures:
        """Move `count` rooms, `ROOMS_AT_ONCE` of them at a time."""
        seconds = 0.0
        for first in range(0, count, ROOMS_AT_ONCE):
            batch = {"first": first + 1, "count": min(ROOMS_AT_ONCE, count - first)}
            moved: Figures
            moved, _ = await asyncio.gather(
                self.crowd.ask("rooms", **batch), self.node.ask("rooms", **batch)
            )
            seconds += moved["seconds"]
        return {"rooms_per_s": round(count / seconds, 1)}


async def bench_peers(peers: int, rooms: int, rest_s: float, say: Say) -> Figures:
    """Return {"peers", "stages": {stage: figures}, "memory_kib_per_decode",
    "cpu_us_per_heartbeat", "must": [...]}.
    """
    async with (
        await Process.run_module(NODE, name="node") as node,
        await Process.run_module(PEERS, name="decodes") as crowd,
    ):
        ready = await node.ask("setup", peers=peers)
        await crowd.ask("setup", **ready)
        stages = _Stages(node, crowd, say)
        await stages.rest("alone", rest_s, min(rest_s, SETTLE_S))
        await crowd.ask("beat", on=True)
        joined = await stages.stage("registering", crowd.ask("register", count=peers))
        # Each decode learns the pace of its heartbeats from the answer to one of them.
        await asyncio.sleep(SETTLE_S)
        await stages.rest("at rest", rest_s, rest_s)
        beat_s = await stages.heartbeats()
        await stages.stage("rooms", stages.rooms(rooms))
        await stages.stage("after rooms", asyncio.sleep(2.0))
        await stages.stage("loss of a rack", stages.lose(peers // RACK))
        await stages.stage("loss of all", stages.lose(peers, silent=peers))
        await stages.rest("all lost", min(rest_s, LOST_S), min(rest_s, SETTLE_S))
        again = await stages.stage("registering again", crowd.ask("register", count=peers))
        await stages.stage("goodbyes of decodes", crowd.ask("part"))
        await stages.stage("and again", crowd.ask("register", count=peers))
        await node.ask("watch")
        parted = await node.ask("part")
        stages.figures["goodbye of the node"] = {**parted, **await node.ask("watched")}
    per_decode = (joined["rss_kib"] - stages.figures["alone"]["rss_kib"]) / peers
    report = {
        "peers": peers,
        "stages": stages.figures,
        "memory_kib_per_decode": round(per_decode, 2),
        "cpu_us_per_heartbeat": round(1e6 * beat_s, 1),
        "must": _judged(stages.figures, peers, max(joined["seconds"], again["seconds"]), beat_s),
    }
    for line in report["must"]:
        say(
            f"{'ok  ' if line['ok'] else 'MISS'} {line['what']}: {line['is']}, "
            f"at most {line['most']}"
        )
    return report


def _judged(stages: Figures, peers: int, register_s: float, beat_s: float) -> list[Figures]:
    found = [
        (f"p99 of stalls, {name}, ms", seen["stall_p99_ms"], MUST_STALL_MS)
        for name, seen in stages.items()
    ]
    resting = round(stages["at rest"]["resting_cpu"] - stages["alone"]["resting_cpu"], 4)
    # Few decodes send a heartbeat each second.
    busy = round(beat_s * min(peers, Bounds().idle_heartbeats_per_s), 4)
    found += [
        (f"{peers} idle decodes, share of a core at rest", resting, MUST_CPU_SHARE),
        ("their heartbeats, share of a core beside other work", busy, MUST_CPU_SHARE),
        (f"registration of {peers} decodes, s", register_s, MUST_REGISTER_S),
    ]
    return [
        {"what": what, "is": value, "most": most, "ok": value <= most}
        for what, value, most in found
    ]
