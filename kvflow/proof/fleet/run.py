"""One run of a fleet, and its report."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvflow.proof.fleet.judge import BrokenError, broken
from kvflow.proof.fleet.nodes import AnyHost, PrefillHost
from kvflow.proof.fleet.plan import Plan
from kvflow.proof.fleet.world import World

LOOKS = 60  # how often the tables are looked at
Report = dict[str, Any]
Say = Callable[[str], None]


def simulate_fleet(plan: Plan, seed: int, say: Say) -> Report:
    """Play one run to its end.

    Returns {"seed", "plan", "violations", "violation", "virtual_s", "cpu_s", "events", "seen",
    "most", "left"}. `most` has the largest size of each table of any node at any look.
    """
    world, begun = World(plan, seed), time.process_time()
    most: Counter[str] = Counter()
    violation = ""
    # Nothing in the simulator is a cycle, and a collection would visit every endpoint.
    gc.disable()
    try:
        _play(world, most, say)
        left = _at_rest(world)
    except BrokenError as error:
        violation, left = str(error), {}
        say(f"seed {seed}: {violation}")
    finally:
        gc.enable()
    return {
        "seed": seed,
        "plan": {"prefills": plan.prefills, "decodes": plan.decodes, "rooms": plan.rooms},
        "violations": int(bool(violation)),
        "violation": violation,
        "virtual_s": round(world.clock.now, 1),
        "cpu_s": round(time.process_time() - begun, 1),
        "events": world.clock.steps,
        "seen": dict(sorted(world.seen.items())),
        "most": dict(most),
        "left": left,
    }


def _play(world: World, most: Counter[str], say: Say) -> None:
    plan, clock = world.plan, world.clock
    for at, accident in (
        (plan.rack_at, world.lose_rack),
        (plan.restart_at, world.restart_all),
        (plan.partition_at, world.part),
    ):
        clock.later(at * plan.traffic_s, None, accident)
    rate = plan.rooms / plan.traffic_s

    def arrive(room: int) -> None:
        world.arrive(room)
        if room < plan.rooms:
            clock.later(world.rng.expovariate(rate), None, arrive, room + 1)

    clock.later(0.0, None, arrive, 1)
    for look in range(1, LOOKS + 1):
        clock.play(plan.traffic_s / LOOKS)
        _look(world, most)
        if look % 6 == 0:
            say(f"{clock.now:.0f} s: {world.seen['landed']} rooms landed")
    # The last rooms may come a little later than planned.
    clock.play(plan.settles_s + plan.traffic_s / LOOKS)
    _look(world, most)


def _look(world: World, most: Counter[str]) -> None:
    """Note the largest size of each table. The bounds must hold at every look."""
    every: list[AnyHost] = [*world.prefills, *world.decodes]
    for host in every:
        if host.alive:
            for name, size in sizes_of(host).items():
                most[name] = max(most[name], size)
    bounds = world.plan.bounds
    for name, limit in (
        ("decodes at a prefill", bounds.targets),
        ("remembered grants at a prefill", bounds.targets * bounds.closed_grants),
        ("displaced decodes at a prefill", bounds.closed_grants),
        ("open links at a decode", bounds.links),
    ):
        if most[name] > limit:
            broken("I6", f"{most[name]} {name}, and its bound is {limit}")


def sizes_of(host: AnyHost) -> dict[str, int]:
    """Return the number of entries in each table of a node's endpoint."""
    core: Any = host.endpoint.core
    if isinstance(host, PrefillHost):
        peers, former = core.peers.values(), core.former
        return {
            "rooms at a prefill": len(core.rooms),
            "decodes at a prefill": len(core.peers),
            "remembered grants at a prefill": sum(peer.grants.remembered for peer in peers),
            "displaced decodes at a prefill": len(former.displaced),
            "decodes in doubt at a prefill": len(former.in_doubt),
            "refused decodes at a prefill": len(core.refused),
            "announcements at a prefill": len(core.rendezvous.announced),
            "timers at a prefill": len(core.deadlines),
        }
    links = core.links.peers.values()
    return {
        "rooms at a decode": len(core.rooms),
        "loans at a decode": len(core.ledger),
        "links at a decode": len(links),
        "open links at a decode": sum(bool(host.lines.get(peer.key.control)) for peer in links),
        "coverages at a decode": len(core.links.coverage),
        "timers at a decode": len(core.deadlines),
    }


def _at_rest(world: World) -> dict[str, int]:
    """Check that every room has ended and every page is free, but those that an unproven write may
    still reach. Returns what is left.
    """
    seen, left = world.seen, Counter[str]()
    for side in ("decode", "prefill"):
        opened, ended = seen[f"{side} halves"], seen[f"{side} halves that ended"]
        if opened != ended + seen[f"{side} halves that died"]:
            broken("I4", f"of {opened} {side} halves {ended} have ended")
    for prefill in world.prefills:
        core = prefill.endpoint.core
        if prefill.legs or core.rooms or core.writes or core.tasks or core.rendezvous.announced:
            broken("I5", f"{prefill.pool.name} is not at rest: {prefill.endpoint!r}")
        if len(prefill.pool.free) != len(prefill.pool.owners):
            broken("I1", f"{prefill.pool.name} has leaked pages")
        left["remembered grants"] += sum(p.grants.remembered for p in prefill.endpoint.peers)
    for decode in world.decodes:
        if decode.endpoint.rooms or decode.endpoint.core.tasks:
            broken("I5", f"{decode.pool.name} is not at rest: {decode.endpoint!r}")
        owners = [owner for owner in decode.pool.owners if owner is not None]
        if len(decode.pool.free) + len(owners) != len(decode.pool.owners):
            broken("I1", f"{decode.pool.name} has lost pages")
        for owner in owners:
            if owner not in world.unproven:
                broken("I1", f"{decode.pool.name}: a page is still {owner!r}'s")
        left["pages in quarantine"] += len(owners)
        left["loans in doubt"] += len(decode.endpoint.core.ledger)
    return dict(left)
