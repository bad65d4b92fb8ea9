"""A conformance suite for data planes. It tests the promises of `protocols.ports.DataPlane` by
experiment, on kvflow's planes and on your own.

    python -m kvflow.testing.conformance --plane local
    python -m kvflow.testing.conformance --plane my_package.planes:MyAdapter --rooms 10000

An adapter opens planes, and states what they can do:

    class MyAdapter(Adapter):
        def open(self, pool, rate_bytes_per_s):
            return MyPlane(pool.segment, rate_bytes_per_s)

Peers are processes on this machine. The suite kills and freezes them. To run the checks as tests,
use pytest with an asyncio plugin:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    async def test_it_conforms(check):
        try:
            print(await check.run(Bench("my_package.planes:MyAdapter")))
        except NotRunError as error:
            pytest.skip(str(error))

A check that fails raises `NotConformingError`, an AssertionError. A check that cannot run raises
`NotRunError`, with the reason. The suite cannot test two things: what the documentation of the
transfer engine leaves undefined, and how other hardware behaves.
"""

from kvflow.testing.conformance import closings, losses, rooms, writes
from kvflow.testing.conformance.adapter import QUESTIONS, Adapter, NotRunError, load_adapter
from kvflow.testing.conformance.bench import Bench, Check, NotConformingError

CHECKS: tuple[Check, ...] = (*writes.CHECKS, *losses.CHECKS, *closings.CHECKS, *rooms.CHECKS)

__all__ = [
    "CHECKS",
    "QUESTIONS",
    "Adapter",
    "Bench",
    "Check",
    "NotConformingError",
    "NotRunError",
    "load_adapter",
]
