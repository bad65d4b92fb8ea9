"""Two pending writes and two splits of one path, in every order, whatever each write ends with
(I10).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import ANY
from tests.protocols.cache.driver import Driver

LONG = (0, 0, 0, 0)
SHORT_FORK, LONG_FORK = (0, 1), (0, 0, 0, 1)
STEPS = ("begin short", "begin long", "end first", "end second", "split high", "split low")


def possible(order: tuple[str, ...]) -> bool:
    """A write ends after it began: the first end needs one that has begun, the second both."""
    begun = [order.index("begin short"), order.index("begin long")]
    return order.index("end first") > min(begun) and order.index("end second") > max(
        [*begun, order.index("end first")]
    )


ORDERS = [order for order in itertools.permutations(STEPS) if possible(order)]


@pytest.mark.parametrize(
    "route", [(Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.STORAGE), (Tier.HOST, Tier.DEVICE)]
)
@pytest.mark.parametrize("outcomes", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("newest_first", [False, True])
def test_every_order(
    route: tuple[Tier, Tier], outcomes: tuple[bool, bool], newest_first: bool
) -> None:
    """After each step the subscriber knows what can be read per tier, and nothing else; a late
    joiner does, too.
    """
    for order in ORDERS:
        driver = Driver("lru")
        driver.insert(ANY, LONG, 0, False)
        if route[0] is Tier.HOST:  # a load back
            driver.begin_write(ANY, LONG, (Tier.DEVICE, Tier.HOST), 0)
            driver.end(min(driver.oracle.writes), True)
            driver.evict(Tier.DEVICE, len(LONG))
        steps = actions(driver, route, outcomes, newest_first)
        for name in order:
            steps[name]()
            driver.subscribers_know_what_can_be_read()
            driver.every_page_is_free_or_held()
        driver.finish()


def actions(
    driver: Driver, route: tuple[Tier, Tier], outcomes: tuple[bool, bool], newest_first: bool
) -> dict[str, Callable[[], None]]:
    def end(landed: bool) -> None:
        # The longer one may have found nothing left to copy.
        if writes := sorted(driver.oracle.writes):
            driver.end(writes[-1 if newest_first else 0], landed)

    return {
        "begin short": lambda: driver.begin_write(ANY, LONG[:2], route, 0),
        "begin long": lambda: driver.begin_write(ANY, LONG, route, 0),
        "end first": lambda: end(outcomes[0]),
        "end second": lambda: end(outcomes[1]),
        "split high": lambda: driver.insert(ANY, SHORT_FORK, 0, False),
        "split low": lambda: driver.insert(ANY, LONG_FORK, 0, False),
    }
