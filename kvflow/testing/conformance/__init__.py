"""A suite that proves a data plane: what `protocols.ports.DataPlane` promises, shown by experiment,
on planes that ship and on yours.

    python -m kvflow.testing.conformance --plane local
    python -m kvflow.testing.conformance --plane my_package.planes:MyAdapter --rooms 10000

An adapter opens a plane, and states what it can do:

    class MyAdapter(Adapter):
        def open(self, pool, rate_bytes_per_s):
            return MyPlane(pool.segment, rate_bytes_per_s)

Peers are processes of this machine, which are killed and frozen. As tests, with pytest and an
asyncio plugin:

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    async def test_it_conforms(check):
        try:
            print(await check.run(Bench("my_package.planes:MyAdapter")))
        except NotRunError as error:
            pytest.skip(str(error))

A check that fails raises `NotConformingError`, an AssertionError. One that cannot run raises
`NotRunError`, with the reason. Two things the suite cannot show, and the author has to find out:
what the engine's own documents leave open, and how other hardware behaves.
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
