"""A user's mistake is said where it is made: the field, the value, the limit."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

import kvflow
from kvflow.protocols.wire.messages import MAX_PAGES_PER_ROOM
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.testing.pair import Pair, small_layout
from kvflow.transports.data.fake import FakeNetwork, FakePlane

PROMPT = range(10)  # 2.5 pages of 4
pytest_plugins = ["kvflow.testing.fixtures"]
PROMPTS = [
    ([], "the prompt is empty: at least 1 token is needed"),
    (np.empty(0, np.int32), "the prompt is empty: at least 1 token is needed"),
    ([[1, 2]], r"list of token ids, not shape \(1, 2\) of int64"),
    ([1.5], r"list of token ids, not shape \(1,\) of float64"),
    ("a prompt", r"list of token ids, not shape \(\) of <U8"),
    ([True], r"list of token ids, not shape \(1,\) of bool"),
    ([1, -2], "token id -2 is not an unsigned 32-bit integer"),
    ([1 << 32], f"token id {1 << 32} is not an unsigned 32-bit integer"),
]


def misuse(text: str) -> pytest.RaisesExc[kvflow.MisuseError]:
    return pytest.raises(kvflow.MisuseError, match=text)


@pytest.mark.parametrize(("prompt", "text"), PROMPTS)
async def test_what_is_not_a_prompt(kvflow_pair: Pair, prompt: Any, text: str) -> None:
    p = kvflow_pair
    with misuse(text):
        p.prefill.room(7, prompt)
    with misuse(text):
        p.decode.room(7, p.ranks, prompt)
    await p.rest()


@pytest.mark.parametrize("prefix", [-4, 3, 12, 9])
async def test_a_prefix_that_is_not_whole_pages(kvflow_pair: Pair, prefix: int) -> None:
    p = kvflow_pair
    text = (
        f"prefix_tokens {prefix} is neither a whole number of 4-token pages nor all of the 10 "
        "tokens of the prompt"
    )
    with misuse(text):
        p.decode.room(7, p.ranks, PROMPT, prefix_tokens=prefix)
    await p.rest()


async def test_a_prompt_of_more_pages_than_an_offer_may_have(kvflow_pair: Pair) -> None:
    """Prefill would drop the offer as malformed, and both legs would wait."""
    p = kvflow_pair
    prompt = np.zeros(4 * MAX_PAGES_PER_ROOM + 1, dtype=np.uint32)
    most = 4 * MAX_PAGES_PER_ROOM
    text = rf"tokens of one room, in whole pages: asked for {most + 4}, limit {most}"
    with pytest.raises(kvflow.CapacityError, match=text):
        p.decode.room(7, p.ranks, prompt)
    await p.rest()


async def test_a_room_before_start_and_a_node_of_no_plane() -> None:
    pool = kvflow.PagedPool.allocate(small_layout(), shared=False)
    planes = FakeNetwork()
    prefill = kvflow.PrefillNode(pool, FakePlane(planes))
    decode = kvflow.DecodeNode(pool, FakePlane(planes))
    assert "new" in repr(prefill) and "new" in repr(decode)
    with misuse(r"the prefill node is not started: .* or start\(\)"):
        prefill.room(7, PROMPT)
    with misuse(r"the decode node is not started: .* or start\(\)"):
        decode.room(7, [], PROMPT)
    for node in (prefill, decode):
        await node.close()
    with misuse("no data plane 'nvlink'; there are: local, mooncake"):
        kvflow.DecodeNode(pool, "nvlink")
    for incarnation in (0, -1, 1 << 64):
        with misuse(f"incarnation {incarnation} is not a positive unsigned 64-bit"):
            kvflow.DecodeNode(pool, FakePlane(planes), incarnation=incarnation)
    pool.close()


async def test_prefill_by_a_name_that_nothing_resolves(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    p.decode._resolve = None
    with misuse(r"prefill '10\.0\.0\.1:8998': this node was given no resolve\(\)"):
        p.decode.room(7, "10.0.0.1:8998", PROMPT)


def changed(info: RankInfo, **fields: Any) -> RankInfo:
    return msgspec.structs.replace(info, **fields)


async def test_a_registry_that_is_wrong_is_no_misuse(kvflow_pair: Pair) -> None:
    """Ranks come from peers: whatever is wrong with them is a peer's fault."""
    p = kvflow_pair
    (info,) = p.ranks
    cases: list[tuple[list[RankInfo], type[kvflow.KvflowError], str]] = [
        ([], kvflow.LostError, "no rank of that prefill is known"),
        (
            [changed(info, world_size=2), changed(info, rank=1, world_size=2)],
            kvflow.PeerError,
            "one incarnation for two ranks",
        ),
        ([changed(info, incarnation=5)], kvflow.LostError, "another incarnation answers"),
        ([changed(info, rank=1)], kvflow.PeerError, r"rank 1 is outside 0\.\.0"),
        (
            [
                changed(info, incarnation=n + 5, rank=n)
                for n in range(p.decode.bounds.ranks_per_room + 1)
            ],
            kvflow.PeerError,
            f"{p.decode.bounds.ranks_per_room + 1} ranks",
        ),
    ]
    for room, (ranks, expected, text) in enumerate(cases):
        with pytest.raises(expected, match=text) as caught:
            await p.decode.room(room, ranks, PROMPT)
        assert not isinstance(caught.value, kvflow.MisuseError)
    await p.rest()


@pytest.mark.parametrize(
    "control", ["nonsense", "tcp://:", "tcp://10.0.0.1:99999999", "tcp://127.0.0.1:0", "\0", ""]
)
async def test_a_control_address_of_a_peer_that_makes_no_sense(control: str) -> None:
    pool = kvflow.PagedPool.allocate(small_layout(), shared=False)
    bad = RankInfo(0, 1, 5, control, "fake", "")
    async with kvflow.DecodeNode(
        pool, FakePlane(FakeNetwork()), timing=kvflow.Timing(register_s=0.3)
    ) as decode:
        with pytest.raises((kvflow.RefusedError, kvflow.LostError)) as caught:
            await decode.room(7, [bad], PROMPT, deadline_s=5)
        assert not isinstance(caught.value, kvflow.MisuseError)
        assert pool.pages.at_rest() and decode.counts.handler_errors == 0
    pool.close()


async def test_what_users_print_says_what_it_is(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    source, target = await p.open(7, PROMPT)
    assert repr(p.prefill).startswith("<PrefillNode ") and repr(p.decode).endswith(
        "over fake: running>"
    )
    assert (
        repr(source).startswith("<PrefillRoom 7: ")
        and repr(target) == "<DecodeRoom 7: waiting_for_input, 3 pages>"
    )
    assert repr(p.prefill.shell.endpoint).endswith(": 1 rooms, 1 decodes, 0 writes>")
    assert repr(p.decode.shell.endpoint).endswith(": 1 rooms, 1 prefill ranks, 1 loans>")
    plane = kvflow.LocalPlane(None)
    assert repr(plane) == "<LocalPlane of a pool that only sends: 0 routes>"
    table = kvflow.RankTable()
    table.put(p.prefill.info)
    assert repr(table) == "<RankTable of ranks [0]>"
    target.close()


async def test_nothing_begins_at_a_node_that_is_closed(kvflow_pair: Pair) -> None:
    p, cause = kvflow_pair, kvflow.Cause(kvflow.Code.CAPACITY)
    (await p.decode.room(1, p.ranks, PROMPT)).close()
    await p.rest()
    dialled: list[object] = []
    p.decode.shell.connections._connect = lambda *where: dialled.append(
        where,
    )  # type: ignore[assignment]
    await p.decode.close()
    for begin in (
        lambda: p.decode.room(7, p.ranks, PROMPT),
        lambda: p.decode.room(7, "sim", PROMPT),
        lambda: p.decode.announce(7, p.ranks, PROMPT),
        lambda: p.decode.refuse(7, p.ranks, cause),
        lambda: p.decode.refuse(7, "sim", cause),
    ):
        with misuse("the decode node is closed"):
            begin()
    with pytest.raises(kvflow.AbortedError, match="decode is shutting down"):
        p.decode.shell.endpoint.refuse_room(7, p.ranks, cause, 0.0)
    assert (
        not dialled
        and not list(p.decode.shell.endpoint.peers)
        and not len(p.decode.shell.endpoint.core.ledger)
    )
    await p.prefill.close()
    with misuse("the prefill node is closed"):
        p.prefill.room(7, PROMPT)
    with misuse("the prefill node is closed"):
        p.prefill.refuse(7, cause)
    for node in p.nodes:
        with misuse(f"the {node.role} node was started before: make a new one"):
            await node.start()


async def test_a_node_is_started_once(kvflow_pair: Pair) -> None:
    for node in kvflow_pair.nodes:
        shell = node.shell
        with misuse(f"the {node.role} node was started before: make a new one"):
            await node.start()
        assert node.shell is shell


RANKS: list[tuple[list[tuple[int, int]], str]] = [
    ([(0, 2)], r"prefill tcp://a:1 has world_size 2, and 1 rank is given"),
    ([(0, 1), (0, 1)], r"prefill tcp://a:1 has world_size 1, and 2 ranks are given"),
    ([(0, 2), (1, 2), (1, 2)], r"prefill tcp://a:1 has world_size 2, and 3 ranks are given"),
    ([(0, 2), (0, 2)], r"prefill tcp://a:2: rank 0 is given twice"),
    ([(0, 2), (1, 3)], r"prefill tcp://a:2 has world_size 3, and tcp://a:1 has 2"),
    ([(0, 2), (2, 2)], r"prefill tcp://a:2: rank 2 is outside 0\.\.1"),
    ([(-1, 1)], r"prefill tcp://a:1: rank -1 is outside 0\.\.0"),
]


@pytest.mark.parametrize(("ranks", "text"), RANKS)
async def test_ranks_that_are_no_whole_prefill(
    kvflow_pair: Pair, ranks: list[tuple[int, int]], text: str
) -> None:
    p = kvflow_pair
    given = [
        RankInfo(rank, size, n, f"tcp://a:{n}", "fake", "")
        for n, (rank, size) in enumerate(ranks, 1)
    ]
    with pytest.raises(kvflow.PeerError, match=text):
        await p.decode.room(7, given, PROMPT)
    assert not list(p.decode.shell.endpoint.peers)  # none of them was dialled
    await p.rest()


TIMES = [float("nan"), float("inf"), float("-inf"), -1.0, 1e300, 86_400 * 31, "5", [5]]


@pytest.mark.parametrize("value", TIMES)
async def test_what_is_not_a_time(kvflow_pair: Pair, value: Any) -> None:
    p = kvflow_pair
    said = re.escape(repr(value))
    deadline = rf"^deadline_s {said} is not a number of seconds between 0 and 2592000$"
    rendezvous = rf"^rendezvous_s {said} is not a number of seconds between 0 and 2592000$"
    for call, text in (
        (lambda: p.decode.room(7, p.ranks, PROMPT, deadline_s=value), deadline),
        (lambda: p.decode.announce(7, p.ranks, PROMPT, deadline_s=value), deadline),
        (lambda: p.prefill.room(7, PROMPT, deadline_s=value), deadline),
        (lambda: p.prefill.room(7, PROMPT, rendezvous_s=value), rendezvous),
        (lambda: kvflow.Timing(rendezvous_s=value), rendezvous),
        (
            lambda: kvflow.ExternalPages(8).wait_idle([1], value),
            rf"^timeout_s {said} is .* between 0 and 2592000$",
        ),
    ):
        with misuse(text):
            call()
    for made, name in (
        (kvflow.Timing, "heartbeat_s"),
        (kvflow.Timing, "lost_after_s"),
        (kvflow.Timing, "repeat_after_s"),
        (kvflow.Timing, "register_s"),
        (kvflow.RegistryClient, "timeout_s"),
    ):
        with misuse(rf"^{name} {said} is .* between 0\.001 and 2592000$"):
            made(**{name: value})
    await p.rest()


async def test_times_at_the_limits(kvflow_pair: Pair) -> None:
    p = kvflow_pair
    values: tuple[Any, ...] = (86_400 * 30, np.float32(60))
    for room, value in enumerate(values):
        p.prefill.room(room, PROMPT, deadline_s=value, rendezvous_s=value)
        (await p.decode.room(room, p.ranks, PROMPT, deadline_s=value)).close()
    with pytest.raises(kvflow.AbortedError, match="deadline of 0 s has passed"):
        await (await p.decode.room(7, p.ranks, PROMPT, deadline_s=0)).landed()
    with pytest.raises(kvflow.LostError, match="nothing more came for"):
        await p.prefill.room(8, PROMPT, rendezvous_s=0).matched()
    with misuse(r"heartbeat_s 0 is not a number of seconds between 0\.001 and"):
        kvflow.Timing(heartbeat_s=0)
    await p.rest()


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"closed_grants": True}, "closed_grants True is not a whole number"),
        ({"quarantine_share": float("nan")}, "quarantine_share nan is not between 0 and 1"),
        ({"quarantine_share": 1.5}, r"quarantine_share 1\.5 is not between 0 and 1"),
        ({"links": -1}, "links -1 is not a whole number"),
        ({"rooms": 1.5}, r"rooms 1\.5 is not a whole number"),
    ],
)
def test_what_bounds_nothing(bounds: dict[str, Any], text: str) -> None:
    with misuse(text):
        kvflow.Bounds(**bounds)
