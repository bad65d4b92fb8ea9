"""Widths that differ, over planes that take a block at a time: slices pass through staging."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.errors import AbortedError
from kvflow.testing.pair import until
from kvflow.transports.data.route import PlannedRoute
from kvflow.transports.data.slices import TINY_BELOW_BYTES
from kvflow.transports.data.staged import StagedRoute
from tests.memory.gate import CopyGate
from tests.ranks.shards import PAGE_SIZE, Whole, everything, fill, heads, truth_of
from tests.ranks.test_planes import PAGES, PLANES, TOKENS, Group, group, opened, taken, transferred

CASES = [
    pytest.param(heads(2, 8), (1, 2), 1, False, True, id="TP 2 to 1"),
    pytest.param(heads(2, 8), (1, 1), 2, True, False, id="TP 1 to 2"),
    pytest.param(heads(2, 8), (1, 2), 4, True, False, id="TP 2 to 4"),
    pytest.param(heads(2, 6), (1, 3), 2, True, True, id="TP 3 to 2"),
    pytest.param(heads(4, 4), (2, 2), 1, False, True, id="PP 2 x TP 2"),
    pytest.param(everything(2), (1, 2), 1, False, True, id="states, TP 2 to 1"),
    pytest.param(everything(2), (1, 2), 4, True, True, id="states, TP 2 to 4"),
]


@pytest.fixture(autouse=True)
def _tiny_for_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tiny for mooncake is so for local too: the same code, in little time."""
    monkeypatch.setitem(TINY_BELOW_BYTES, "local", TINY_BELOW_BYTES["mooncake"])


def in_slices(g: Group) -> list[bool]:
    """Whether each rank writes some of a page, or row, in slices."""
    found = []
    for node in g.prefills:
        [route] = node.shell.routes.values()
        assert isinstance(route, PlannedRoute)
        planner = route.inner.planner if isinstance(route, StagedRoute) else route.planner
        found.append(planner._pairing.in_slices)
    return found


@asynccontextmanager
async def at_rest_afterwards(*given: Any, **more: Any) -> AsyncIterator[Group]:
    """A group, whose staging is nobody's in the end."""
    async with group(*given, **more) as g:
        yield g
        await g.decode.close()
        for node in g.prefills:
            await node.close()
        nodes: list[PrefillNode | DecodeNode] = [*g.prefills, g.decode]
        stagings = [node.staging for node in nodes if node.staging is not None]
        assert stagings and all(staging.host.places.at_rest() for staging in stagings)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize(("streams", "prefill", "decode", "gathers", "lands"), CASES)
async def test_every_byte_lands_where_it_belongs_in_large_blocks(
    plane: str,
    streams: list[Whole],
    prefill: tuple[int, int],
    decode: int,
    gathers: bool,
    lands: bool,
    seed: int,
) -> None:
    truth = truth_of(streams, TOKENS, seed)
    staging = {"gathers": gathers, "lands": lands}
    async with at_rest_afterwards(plane, streams, prefill, decode, verify=True, **staging) as g:
        await transferred(g, truth, 1, TOKENS, chunks=3)
        assert g.decode.counts.mismatched == 0
        assert not any(in_slices(g))


@pytest.mark.parametrize(
    ("prefill", "decode", "side"), [((1, 2), 1, "lands"), ((1, 1), 2, "gathers")]
)
async def test_an_abort_in_mid_copy_leaves_no_late_byte(
    prefill: tuple[int, int], decode: int, side: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages are free when the copies from or to them have ended."""
    streams, tokens = heads(2, 8), PAGES * PAGE_SIZE
    truth = truth_of(streams, tokens, seed)
    async with at_rest_afterwards("local", streams, prefill, decode, **{side: True}) as g:
        sources, target = await opened(g, 1, range(tokens))
        gate = CopyGate(monkeypatch)
        for node, source in zip(g.prefills, sources, strict=True):
            places = taken(node, PAGES, rows=False)
            fill(node.pool, places, truth)
            source.send(places[0], last=True)
        await gate.reached()
        target.close()
        with pytest.raises(AbortedError):
            await target.landed()
        if side == "lands":
            await until(lambda: not g.decode.shell.endpoint.rooms)
            assert g.decode.pool.pages.free_pages == 0 and not target.when_released.given
        else:
            assert (
                g.prefills[0].pool.pages.held_pages == PAGES and not g.decode.pool.pages.free_pages
            )
        gate.go.set()
        await target.released()
        assert g.decode.pool.pages.at_rest()
        for c in g.decode.pool.layout.components:  # what is copied from here on would show
            g.decode.pool.array(c.name, start=c.start)[:] = 0
        for node, source in zip(g.prefills, sources, strict=True):
            await source.released()
            assert not node.pinned_pages
        for c in g.decode.pool.layout.components:
            assert not g.decode.pool.array(c.name, start=c.start).any()
        for node in g.prefills:
            node.pool.pages.give_back(node.pool.pages.pages_of("test"), "test")
        await transferred(g, truth, 2, tokens)


async def test_what_would_be_tiny_is_said_and_what_to_do(
    caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    streams = heads(2, 8)
    truth = truth_of(streams, TOKENS, seed)
    with caplog.at_level(logging.INFO):
        # Of no use here: the target is in slices.
        async with group("local", streams, (1, 2), 1, gathers=True) as g:
            await transferred(g, truth, 1, TOKENS)
            assert all(in_slices(g))
            for node in g.prefills:
                [route] = node.shell.routes.values()
                assert isinstance(route, StagedRoute)
                assert route._out is route.staging.plan_out(), "nothing is gathered"
        assert (
            "slices of 32 bytes are slow over local" in caplog.text
            and "--disaggregation-prefill-tp" in caplog.text
        )
        caplog.clear()
        async with group("local", streams, (1, 1), 2, gathers=True) as g:
            await transferred(g, truth, 1, TOKENS)
        assert (
            "slices of 32 bytes are written over local in blocks of 1024, from staging"
            in caplog.text
        )
        assert "are slow" not in caplog.text


async def test_blocks_that_are_large_enough_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Where widths are equal, or the plane is fast, pages are staged as they lie."""
    monkeypatch.delitem(TINY_BELOW_BYTES, "local")
    streams = heads(2, 8)
    for prefill, decode in (((1, 1), 2), ((1, 1), 1)):
        async with group("local", streams, prefill, decode, gathers=True) as g:
            await transferred(g, truth_of(streams, TOKENS, seed), 1, TOKENS)
            [route] = g.prefills[0].shell.routes.values()
            assert isinstance(route, StagedRoute)
            assert route._out is route.staging.plan_out(), "nothing is gathered"
