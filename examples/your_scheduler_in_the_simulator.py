"""Your scheduler under faults that cannot be staged by hand: lost messages, crashes, late writes,
full pools.

    python examples/your_scheduler_in_the_simulator.py

The simulator plays real prefill and decode nodes in virtual time. Give it your scheduling as the
two coroutines of a `Scheduler`; it checks at every step that no page is lost, freed too early or
filled with another room's bytes, and that all comes to rest.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable

from kvflow.aio import in_thread
from kvflow.node import PrefillNode
from kvflow.proof.sim.engine import Job, PlainScheduler
from kvflow.proof.sim.run import simulate

AT_ONCE = 3


# --- what you write: decode stays as it is in PlainScheduler, prefill takes three prompts at a time
class YourScheduler(PlainScheduler):
    def __init__(self) -> None:
        self.turns: dict[PrefillNode, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(AT_ONCE)
        )

    async def run(self, step: Callable[[], None]) -> None:
        await in_thread(step)  # to its end, even when the client goes away meanwhile

    async def prefill(self, node: PrefillNode, job: Job) -> None:
        async with node.room(job.room, job.prompt, deadline_s=job.deadline_s) as room:
            await room.matched()
            async with self.turns[node]:
                # Pages and, in some of the simulator's pools, rows or pages of a second size.
                layout = node.pool.layout
                pages = node.pages.take_room(layout.wanted(len(job.prompt)), room)
                chunks = job.placed_chunks(layout)
                try:
                    for number, which in enumerate(chunks, 1):
                        last = number == len(chunks)
                        await self.run(job.model_step(node, pages[which], which))
                        room.send(pages[which], last=last, handoff=job.handoff if last else b"")
                    await room.done()
                    job.succeeded = True
                finally:
                    node.pages.give_back(pages, room)


class HastyScheduler(YourScheduler):
    """The same with a bug: when a client goes away, its pages go back while the model step still
    writes them.
    """

    async def run(self, step: Callable[[], None]) -> None:
        await asyncio.to_thread(step)


def main() -> None:
    steps = 0
    for seed in range(30):
        outcome = simulate(seed, YourScheduler())
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        steps += outcome.steps
    print(f"YourScheduler: 30 seeds, {steps} steps, nothing broken")
    for seed in range(300):
        violation = simulate(seed, HastyScheduler()).violation
        if violation is not None:
            print(f"HastyScheduler: seed {seed} breaks {violation.invariant}: {violation.text}")
            return
    raise AssertionError("the bug was not found")


if __name__ == "__main__":
    main()
