"""Input of one seed: the nodes, the requests and their fates, and the accidents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvflow.proof.sim.faults import ON_LINKS, ON_NODES, Faults
from kvflow.proof.sim.stay import Stay, draw_stay
from kvflow.proof.sim.variety import (
    LAYOUT_WITH_WINDOWS,
    PAGE_SIZE,
    Variety,
    draw_two_layouts,
    draw_variety,
)

Shape = tuple[tuple[int, ...], int]
SHAPES: Sequence[Shape] = (((1, 1), 1), ((2,), 1), ((1,), 2), ((2,), 2), ((1, 1), 2), ((2, 1), 1))
"""Ranks of each prefill group, and number of decodes. Each shape has at least three nodes."""
PROMPT_PAGES_MAX = 6
# Shares of the seeds that have each extension.
WINDOWS_IN = 0.2
PAGE_SIZES_IN = 0.15
SWITCHES_IN = 0.3
STAGED_IN = 0.25
DP_GROUPS_IN = 0.25
THREADS_IN = 0.25
SWITCH_ROOM = 500_000  # number of the first room for a node in its other role

OWN_GROUP, EVERY_GROUP, WORD = "own group", "every group", "word"
"""Ways in which decode names the prefill of a room: by the ranks of the room's group, by those of
all groups, or by a word that a registry knows.
"""

Moment = tuple[float, str]
"""Seconds after the leg began, and the act that ends it: cancel, cancel twice, close or storm."""


class Leg(NamedTuple):
    at_s: float
    ends: Moment | None = None
    deadline_s: float | None = None


class Request(NamedTuple):
    """One request. `prefill` or `decode` is None for a leg that never comes."""

    room: int
    prompt: list[int]
    chunks: list[int]
    group: int
    decode_at: int
    prefill: Leg | None
    decode: Leg | None
    decode_prompt: list[int]
    fails_at: int | None
    refused: bool
    kept_s: float
    decode_refused: bool = False
    # Delay from decode's announcement of the room to its offer of pages. If None, decode announces
    # nothing.
    offers_after_s: float | None = None
    # True if the end of its room closes the other rooms of the node, from within `on_end`.
    topples: bool = False
    stay: Stay | None = None  # what the request does after its room lands
    named: str = OWN_GROUP  # how decode names its prefill
    # Group that decode asks for. If it is None, the room's number decides.
    dp_rank: int | None = None


class Accident(NamedTuple):
    """One accident. `node` is an index into all nodes, prefill ranks first."""

    at_s: float
    kind: str
    node: int
    for_s: float


class Switch(NamedTuple):
    """Switch of roles: a node shuts down, and one of the other role takes over its pool.

    `requests` are for the other role. Their times, and `back_after_s`, count from the start of that
    role. Without `back_after_s`, the node does not switch back.
    """

    at_s: float
    node: int
    requests: tuple[Request, ...] = ()
    back_after_s: float | None = None


class Scenario(NamedTuple):
    """A complete run, as drawn from one seed. `groups` holds the number of ranks in each group.

    Each group is a prefill, except that the groups in `data_parallel` form one prefill together, in
    the order of their `dp_rank`.
    """

    groups: tuple[int, ...]
    decodes: int
    variety: Variety
    requests: list[Request]
    accidents: list[Accident]
    switch: Switch | None = None
    data_parallel: tuple[int, ...] = ()
    # Decodes, and prefill groups, whose engines have no event loop.
    threaded: frozenset[int] = frozenset()
    threaded_groups: frozenset[int] = frozenset()

    @property
    def forgetful(self) -> bool:
        """True if a prefill may have to forget ended grants or ended halves during the run."""
        bounds, rooms = self.variety.bounds, len(self.requests)
        return bounds.closed_grants < rooms or bounds.ended_halves < rooms


def draw(rng: random.Random, faults: Faults, shapes: Sequence[Shape] = SHAPES) -> Scenario:
    groups, decodes = rng.choice(shapes)
    requests: list[Request] = []
    for n in range(rng.randint(10, 14)):
        request = _request(rng, n, len(groups), decodes)
        if request.decode is not None and rng.random() < 0.2:
            requests += _retracted(rng, request, request.decode)
        else:
            requests.append(request)
    nodes = sum(groups) + decodes
    accidents = []
    for kind in (*ON_NODES, *ON_LINKS):
        if kind in faults.kinds:
            for _ in range(rng.randint(1, 2)):
                # Only a prefill has an address and writes: takeovers and stalls strike no decode.
                first = nodes if kind not in ("takeover", "stall") else sum(groups)
                for_s = _duration_s(rng) * (2 if kind == "stall" else 1)
                at_s = rng.uniform(0.05, 2.2)
                accidents.append(Accident(at_s, kind, rng.randrange(first), for_s))
    return Scenario(groups, decodes, draw_variety(rng, decodes), requests, accidents)


def with_windows(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give some seeds pools of three spaces: pages, pages of a window, and rows."""
    if rng.random() >= WINDOWS_IN:
        return scenario
    variety = scenario.variety._replace(layout=LAYOUT_WITH_WINDOWS)
    return scenario._replace(variety=variety)


def with_page_sizes(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give some seeds prefills and decodes whose pages differ in size."""
    if rng.random() >= PAGE_SIZES_IN:
        return scenario
    prefill, decode = draw_two_layouts(rng)
    variety = scenario.variety._replace(layout=prefill, at_decode=decode)
    return scenario._replace(variety=variety)


def with_dp_groups(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give some seeds a prefill with two or three data-parallel groups.

    Requests with the same room number go to the same group.
    """
    if rng.random() >= DP_GROUPS_IN:
        return scenario
    groups, dp_size = scenario.groups, rng.choice((2, 2, 3))
    first = rng.randrange(len(groups))
    ranks, more, prefill_ranks = groups[first], dp_size - 1, sum(groups)
    own = (first, *range(len(groups), len(groups) + more))
    drawn: dict[int, tuple[str, int | None, int]] = {}

    def of_a_group(request: Request) -> Request:
        if request.group != first:
            return request
        if request.room not in drawn:
            drawn[request.room] = _draw_group(rng, request.room, own)
        named, dp_rank, group = drawn[request.room]
        return request._replace(named=named, dp_rank=dp_rank, group=group)

    def elsewhere(accident: Accident) -> Accident:
        start, node = sum(groups[:first]), accident.node
        if node >= prefill_ranks:
            return accident._replace(node=node + more * ranks)
        if start <= node < start + ranks and (moved := rng.randrange(dp_size)):
            return accident._replace(node=prefill_ranks + (moved - 1) * ranks + node - start)
        return accident

    return scenario._replace(
        groups=groups + (ranks,) * more,
        data_parallel=own,
        requests=[of_a_group(request) for request in scenario.requests],
        accidents=[elsewhere(accident) for accident in scenario.accidents],
    )


def _draw_group(
    rng: random.Random, room: int, groups: tuple[int, ...]
) -> tuple[str, int | None, int]:
    """Return the form in which decode names the prefill, the `dp_rank` that decode asks for, and
    the group at which prefill's leg waits.

    If decode asks for a missing group, prefill's leg waits at any group.
    """
    size, chance = len(groups), rng.random()
    named = rng.choice((OWN_GROUP, EVERY_GROUP, WORD, WORD))
    if chance < 0.4:
        return named, None, groups[room % size]
    if chance < 0.9:
        dp_rank = rng.randrange(size)
        return named, dp_rank, groups[dp_rank]
    return rng.choice((EVERY_GROUP, WORD)), size + rng.randrange(2), rng.choice(groups)


def with_switch(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give some seeds a node that changes its role.

    `rng` is a separate generator, so that the draws of the scenario stay unchanged. Ranks of larger
    groups keep their role, because each holds only a share of every page.
    """
    if rng.random() >= SWITCHES_IN:
        return scenario
    ranks_of_place = [ranks for ranks in scenario.groups for _ in range(ranks)]
    ranks_of_place += [1] * scenario.decodes
    places = [place for place, ranks in enumerate(ranks_of_place) if ranks == 1]
    requests = tuple(
        _request(rng, SWITCH_ROOM + n, 1, 1, within_s=0.4) for n in range(rng.randint(4, 8))
    )
    bounds, variety = scenario.variety.bounds, scenario.variety
    # After a switch, the cluster may have one more decode.
    bounds = msgspec.structs.replace(bounds, targets=bounds.targets + 1)
    return scenario._replace(
        variety=variety._replace(bounds=bounds),
        switch=Switch(
            rng.uniform(0.1, 1.2),
            rng.choice(places),
            requests,
            rng.uniform(0.2, 1.0) if rng.random() < 0.6 else None,
        ),
    )


def with_staging(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give some seeds decodes with staging that is too small for all rooms.

    All rooms then get deadlines, because pages in quarantine may never return.
    """
    if rng.random() >= STAGED_IN:
        return scenario
    layout, switch = scenario.variety.layout, scenario.switch
    size_bytes = rng.choice((4, 6, 8, 12)) * layout.page_bytes * len(layout.spaces)

    def in_time(request: Request) -> Request:
        if request.decode is None or request.decode.deadline_s is not None:
            return request
        return request._replace(decode=request.decode._replace(deadline_s=rng.uniform(2.0, 4.0)))

    return scenario._replace(
        variety=scenario.variety._replace(staging_bytes=size_bytes),
        requests=[in_time(request) for request in scenario.requests],
        switch=switch and switch._replace(requests=tuple(map(in_time, switch.requests))),
    )


def with_threads(rng: random.Random, scenario: Scenario) -> Scenario:
    """Give some nodes engines without an event loop, in seeds without staging.

    A node that changes its role keeps its event loop. Most decodes whose engine has no event loop
    shut down once, just after a request arrives, and start again over their pool.
    """
    if rng.random() >= THREADS_IN or scenario.variety.staging_bytes:
        return scenario
    first = sum(scenario.groups)
    of_place = [group for group, ranks in enumerate(scenario.groups) for _ in range(ranks)]
    switching = None if scenario.switch is None else scenario.switch.node
    decodes, groups = range(scenario.decodes), range(len(scenario.groups))
    threaded = [n for n in decodes if rng.random() < 0.75 and first + n != switching]
    switching_group = of_place[switching] if switching is not None and switching < first else None
    threaded_groups = [g for g in groups if rng.random() < 0.4 and g != switching_group]
    requests = [
        _offered(rng, request) if request.decode_at in threaded else request
        for request in scenario.requests
    ]
    accidents = list(scenario.accidents)
    for number in threaded:
        legs = [request.decode for request in requests if request.decode_at == number]
        begins_s = [leg.at_s for leg in legs if leg is not None]
        if begins_s and rng.random() < 0.7:
            at_s = rng.choice(begins_s) + rng.uniform(0.0, 0.03)
            accidents.append(Accident(at_s, "leave", first + number, rng.uniform(0.05, 0.6)))
    return scenario._replace(
        threaded=frozenset(threaded),
        threaded_groups=frozenset(threaded_groups),
        requests=requests,
        accidents=accidents,
    )


def _offered(rng: random.Random, request: Request) -> Request:
    """Return the request, sometimes changed to announce its room before it has pages.

    Half of the changed requests close the room at about the time when the pages come.
    """
    if request.decode is None or rng.random() > 0.3:
        return request
    offers_after_s, leg = rng.uniform(0.0, 0.3), request.decode
    if rng.random() < 0.5:
        leg = leg._replace(ends=(max(0.0, offers_after_s + rng.uniform(-0.015, 0.003)), "close"))
    return request._replace(decode=leg, offers_after_s=offers_after_s)


def _duration_s(rng: random.Random) -> float:
    """Return a short time, which peers do not notice, or a long one, which may outlast timeouts."""
    return rng.choice((rng.uniform(0.05, 0.6), rng.uniform(0.6, 2.5)))


def _request(
    rng: random.Random, room: int, groups: int, decodes: int, within_s: float = 1.6
) -> Request:
    prompt = [rng.randrange(1 << 31) for _ in range(rng.randint(1, PROMPT_PAGES_MAX * PAGE_SIZE))]
    pages = -(-len(prompt) // PAGE_SIZE)
    at_s = rng.uniform(0.0, within_s)
    prefill: Leg | None = _leg(rng, at_s + rng.choice((0.0, 0.0, rng.uniform(0, 0.4))))
    decode: Leg | None = _leg(rng, at_s + rng.choice((0.0, 0.0, rng.uniform(0, 0.4))))
    fate = rng.random()
    if fate < 0.04:
        prefill = None
    elif fate < 0.08:
        decode = None
    return Request(
        room,
        prompt,
        draw_chunks(rng, pages),
        rng.randrange(groups),
        rng.randrange(decodes),
        prefill,
        decode,
        decode_prompt=prompt if rng.random() > 0.05 else [*prompt[:-1], prompt[-1] ^ 1],
        fails_at=rng.randrange(4) if rng.random() < 0.08 else None,
        refused=rng.random() < 0.04,
        kept_s=rng.uniform(0, 0.5),
        decode_refused=rng.random() < 0.04,
        offers_after_s=rng.uniform(0, 0.6) if rng.random() < 0.15 else None,
        topples=rng.random() < 0.06,
        stay=draw_stay(rng),
    )


def _leg(rng: random.Random, at_s: float) -> Leg:
    ends = None
    if rng.random() < 0.22:
        after_s = rng.choice((rng.uniform(0, 0.03), rng.uniform(0, 0.5)))
        ends = after_s, rng.choice(("cancel", "cancel twice", "close"))
    return Leg(at_s, ends, rng.uniform(0.01, 2.0) if rng.random() < 0.1 else None)


def _retracted(rng: random.Random, request: Request, leg: Leg) -> list[Request]:
    """Return two requests with one room number. Decode closes the first room midway to get its
    pages back, and the second request comes a moment later.
    """
    after_s = rng.uniform(0.0, 0.1)
    again_s = leg.at_s + after_s + rng.uniform(0.001, 0.2)
    # Another prompt makes a mix-up of the two rooms visible.
    prompt = [*request.prompt[:-1], request.prompt[-1] ^ 2]
    again = request._replace(
        prompt=prompt, decode_prompt=prompt, prefill=Leg(again_s), decode=Leg(again_s)
    )
    return [request._replace(decode=leg._replace(ends=(after_s, "close"))), again]


def draw_chunks(rng: random.Random, pages: int) -> list[int]:
    chunks: list[int] = []
    while pages:
        chunks.append(rng.randint(1, min(pages, 3)))
        pages -= chunks[-1]
    return chunks
