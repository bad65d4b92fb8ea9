"""A tree's bench worker with a profiler around its rooms.

    PYTHONPATH=CHECKOUT python -P -m kvflow.bench.profiled_worker prefill|decode

It has one more command: profile(first, count, concurrency, start_at). Times are the CPU time of the
event loop's thread, so other load on the machine does not count. They include the profiler's own
time, which is largest in functions that are called often.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import sys
import time
from typing import Any

import uvloop

from kvflow.bench.worker import Worker, serve


class ProfiledWorker(Worker):
    """A worker that profiles rooms of one page on the event loop's thread."""

    async def profile(self, **rooms: Any) -> dict[str, Any]:
        """Run rooms, and return [file, name, calls, seconds without callees] for each function."""
        profiler = cProfile.Profile(time.thread_time)
        profiler.enable()
        try:
            await self.rooms(pages=1, ticking=False, **rooms)
        finally:
            profiler.disable()
        stats: dict[tuple[str, int, str], Any] = pstats.Stats(
            profiler,
        ).stats  # type: ignore[attr-defined]
        return {
            "functions": [[file, name, seen[1], seen[2]] for (file, _, name), seen in stats.items()]
        }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    uvloop.run(serve(ProfiledWorker(sys.argv[1])))
