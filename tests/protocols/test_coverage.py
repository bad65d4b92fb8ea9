"""What ranks serve must be decode's pool, each byte once, before anything is lent (I8)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvflow.protocols.commands import FreePages, Linked, RoomEnded, RoomFailed
from kvflow.protocols.errors import Code, RefusedError
from kvflow.protocols.pages.coverage import Served, sends_all, served_of, uncovered, within, without
from kvflow.protocols.pages.kinds import StateKind
from kvflow.protocols.pages.layout import PoolLayout, build_layout, opaque_layout
from kvflow.protocols.wire.messages import Abort
from kvflow.testing.shards import shard_layout
from tests.protocols.alone import LAYOUT, OTHER_KEY, OTHER_PREFILL, TWO, LoneDecode, registered

K = StateKind("k", "uint8", (8, 4))
LATENT = StateKind("latent", "uint8", (16,))


def pool(*kinds: StateKind) -> PoolLayout:
    return build_layout(kinds, page_size=4, num_pages=8)


def of(*spans: tuple[str, int, int]) -> tuple[Served, ...]:
    return tuple(Served(*span) for span in spans)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([of(("k", 0, 8), ("latent", 0, 16))], ""),
        ([of(("k", 0, 4), ("latent", 0, 16)), of(("k", 4, 8))], ""),
        ([of(("k", 3, 8)), of(("k", 0, 3), ("latent", 0, 16)), ()], ""),
        ([of(("k", 0, 8))], "latent: no rank sends it"),
        ([of(("k", 0, 4), ("latent", 0, 16))], "k: no rank sends entries 4..8"),
        (
            [of(("k", 2, 4), ("latent", 0, 16)), of(("k", 5, 7))],
            (
                "k: no rank sends entries 0..2; k: no rank sends entries 4..5; k: no rank sends "
                "entries 7..8"
            ),
        ),
        (
            [of(("k", 0, 8), ("latent", 0, 16)), of(("latent", 0, 16))],
            "latent: entries 0..16 come from rank 0 and from rank 1",
        ),
        (
            [of(("k", 0, 5), ("latent", 0, 16)), of(("k", 4, 8))],
            "k: entries 4..5 come from rank 0 and from rank 1",
        ),
        (
            [of(("k", 0, 8), ("k", 0, 8), ("latent", 0, 16))],
            "k: entries 0..8 come from rank 0 and from rank 0",
        ),
        ([of(("k", 0, 8), ("latent", 0, 16), ("v", 0, 8))], "'v' of rank 0 has no place at decode"),
        (
            [of(("k", 0, 8), ("latent", 0, 16), ("k", 8, 8))],
            "k: rank 0 says that it sends entries 8..8",
        ),
        ([()], "k: no rank sends it; latent: no rank sends it"),
    ],
)
def test_what_is_missing_or_sent_twice_is_named(ranks: list[tuple[Served, ...]], text: str) -> None:
    assert uncovered(pool(K, LATENT), ranks) == text
    copies = [kind._replace(replica=copy, replicas=2) for kind in (K, LATENT) for copy in range(2)]
    assert uncovered(pool(*copies), ranks) == text, "decode's copies all come from the same bytes"


def test_few_are_named_of_many() -> None:
    kinds = [StateKind(f"{i}.k", "uint8", (2,)) for i in range(9)]
    assert uncovered(pool(*kinds), [()]).endswith("4.k: no rank sends it; and 4 more")


def test_parts_of_a_decode_are_covered_whatever_the_widths() -> None:
    theirs = pool(*(K._replace(shape=(2, 4), start=2 * i, whole=8) for i in range(4)))
    for ranks in range(1, 17):
        shares = [shard_layout(pool(K, LATENT), rank, ranks).served for rank in range(ranks)]
        assert uncovered(pool(K, LATENT), [served_of(share) for share in shares]) == ""
        only_k = [tuple(each for each in served_of(share) if each.name == "k") for share in shares]
        assert uncovered(theirs, only_k) == ""
        assert "no rank" in uncovered(theirs, only_k[:-1] if ranks < 9 else only_k[2:])


def test_an_opaque_page_is_sent_by_one_rank() -> None:
    layout = opaque_layout({"a": 8, "b": 8}, page_size=4, num_pages=8, tag="t")
    other = opaque_layout({"blob": 16}, page_size=4, num_pages=8, tag="t")
    assert uncovered(layout, [served_of(other)]) == ""
    assert uncovered(layout, [()]) == "a page: no rank sends it"
    assert "come from rank 0 and from rank 1" in uncovered(layout, [served_of(layout)] * 2)


def test_spans() -> None:
    assert without([(0, 8), (10, 12)], [(1, 2), (1, 3), (7, 11)]) == [(0, 1), (3, 7), (11, 12)]
    assert without([(0, 4)], []) == [(0, 4)] and without([(2, 4)], [(0, 9)]) == []
    assert within([(0, 4), (6, 8)], [(2, 7)]) == [(2, 4), (6, 7)]
    assert within([(0, 4)], [(4, 5)]) == []
    assert sends_all(pool(K), of(("k", 0, 8)))
    assert not sends_all(pool(K), of(("k", 0, 4), ("k", 4, 8)))


class TestDecode:
    def test_a_room_ends_when_its_ranks_are_linked_and_nothing_was_lent(self) -> None:
        decode = LoneDecode()
        grant = decode.open(ranks=TWO)
        decode.asked()
        assert not decode.hear(registered(size=2, fresh_from=1))[1:]
        told = decode.hear(
            registered(source=OTHER_PREFILL, rank=1, size=1, fresh_from=1), key=OTHER_KEY
        )
        (failed,) = (each for each in told if isinstance(each, RoomFailed))
        assert failed.cause.code is Code.REFUSED
        assert failed.cause.text == (
            "what prefill tcp://prefill:0 sends is not decode's pool, each byte once: "
            "k: entries 0..4 come from rank 0 and from rank 1"
        )
        assert FreePages(grant) in told
        assert RoomEnded(grant) in told
        assert not any(isinstance(e, Linked) for e in told)
        legs = [entry[1] for entry in told if isinstance(entry, tuple)]
        assert [type(leg) for leg in legs] == [Abort, Abort]
        assert {leg.cause for leg in legs} == {failed.cause}

    def test_the_next_is_refused_when_it_is_opened_and_its_legs_are_told(self) -> None:
        decode = LoneDecode().up(TWO, size=1)
        with pytest.raises(RefusedError, match="each byte once"):
            decode.open(ranks=TWO)
        legs = [message for _, message in decode.asked()]
        assert [type(leg) for leg in legs] == [Abort, Abort] and legs[0].cause.code is Code.REFUSED
        assert not decode.endpoint.rooms

    def test_it_is_found_once_for_each_set_of_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[tuple[PoolLayout, Sequence[tuple[Served, ...]]]] = []

        def noted(layout: PoolLayout, ranks: Sequence[tuple[Served, ...]]) -> str:
            found.append((layout, ranks))
            return uncovered(layout, ranks)

        monkeypatch.setattr("kvflow.protocols.decode.links.uncovered", noted)
        decode = LoneDecode().up(TWO)
        for room in range(3):
            decode.lent(room, TWO)
        halves = [served_of(shard_layout(LAYOUT, rank, 2)) for rank in range(2)]
        assert found == [(LAYOUT, halves)]
