"""Policies that choose among equally fit workers of one role."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from kvflow.router.cache_view import CacheView, Prompts

PolicyName = Literal["cache_aware", "least_loaded", "round_robin"]


class Loaded(Protocol):
    """The properties of a worker that a policy uses."""

    running: int  # requests at the worker now
    served: int  # requests sent to the worker since it joined the router
    turn: int  # number of its latest request; all workers share one numbering
    cache: CacheView


class Policy(msgspec.Struct, frozen=True):
    """A policy by name, with its thresholds.

    `cache_aware` prefers the worker whose cache is known to match the most tokens of the prompt. It
    ignores the cache of an overloaded worker. A worker is overloaded if it exceeds the least loaded
    worker by more than `balance_abs_threshold` requests, and by more than the factor
    `balance_rel_threshold`. Both must hold, because a factor means little for few requests, and a
    difference means little for many. Among equals, or if no cache matches, the policy prefers the
    least loaded worker.
    """

    name: PolicyName = "cache_aware"
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5

    @property
    def reads_prompts(self) -> bool:
        return self.name == "cache_aware"

    def order(self, worker: Loaded, least_running: int, prompts: Prompts) -> tuple[int, ...]:
        """Return a worker's sort key. The best worker has the smallest one.

        `least_running` is the lowest `running` among the fittest workers.
        """
        if self.name == "round_robin":
            return (worker.turn,)
        matched = 0
        if (
            self.reads_prompts
            and prompts.chains
            and not self.is_overloaded(worker.running, least_running)
        ):
            matched = worker.cache.matched(prompts)
        return (-matched, worker.running, worker.served)

    def is_overloaded(self, running: int, least_running: int) -> bool:
        more = running - least_running > self.balance_abs_threshold
        return more and running > least_running * self.balance_rel_threshold
