"""Sets of grants as ranges agree with plain sets (I6)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvflow.protocols.machines.ranges import GrantRanges
from kvflow.protocols.wire.messages import GrantId

grants = st.integers(1, 20)


def contents(ranges: GrantRanges) -> set[int]:
    return {grant for grant in range(30) if GrantId(grant) in ranges}


def runs(numbers: set[int]) -> int:
    return sum(number - 1 not in numbers for number in numbers)


@given(st.lists(st.tuples(grants, st.integers(1, 5), st.none() | grants), max_size=8))
def test_it_holds_what_was_added_in_as_few_ranges_as_can_be(
    steps: list[tuple[int, int, int | None]],
) -> None:
    ranges, plain = GrantRanges(), set[int]()
    for start, count, through in steps:
        ranges.add(GrantId(start), GrantId(start + count))
        plain |= set(range(start, start + count))
        if through is not None:
            end = through
            while end in plain:
                end += 1
            assert ranges.pop_through(GrantId(through)) == end
            plain = {grant for grant in plain if grant >= end}
        assert contents(ranges) == plain and len(ranges) == runs(plain)
    while len(ranges):
        lowest = min(plain)
        while lowest in plain:
            plain.discard(lowest)
            lowest += 1
        assert ranges.pop_first() == lowest
    assert not plain
