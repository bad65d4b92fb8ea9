"""The parts of the backend by themselves: pools, metadata, prompts, places."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.connectors.sglang.counterpart import counterpart, listed, resolver
from kvflow.connectors.sglang.memory import device_of, model_fingerprint, places_of, pool_of
from kvflow.connectors.sglang.metadata import MetadataSlots
from kvflow.connectors.sglang.prompts import PromptSlot, prompt_of
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.arguments import check_prompt
from kvflow.protocols.errors import LayoutError, MisuseError, PeerError, WireError
from kvflow.protocols.pages.coverage import served_of, uncovered
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.layout import Space
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.serve.demo_model import DEMO_MODEL_DIR


def args(**fields: Any) -> Any:
    found = {
        "kv_data_ptrs": [4096, 8192],
        "kv_data_lens": [1030, 1024],
        "kv_item_lens": [64, 64],
        "kv_cache_dtype_str": "bfloat16",
        "kv_layout": None,
        "page_size": 4,
        "state_types": [],
    }
    return SimpleNamespace(**found | fields)


def pool(given: Any, *, rank: int = 0, ranks: int = 1, is_mla: bool = False, **options: Any) -> Any:
    found = {"fingerprint": "m", "device": "cuda:0", "segment": None, **options}
    return pool_of(given, rank=rank, ranks=ranks, is_mla=is_mla, **found)


def test_the_pool_has_sglangs_pages() -> None:
    layout = pool(args()).layout
    assert (layout.num_pages, layout.page_size, layout.page_bytes) == (16, 4, 128)
    assert [b.address for b in layout.buffers] == [4096, 8192]
    assert {c.format for c in layout.components} == {"SGLang 0.5.23 bfloat16 nhd"}


@pytest.mark.parametrize(
    "other", [{"kv_cache_dtype_str": "fp8_e4m3"}, {"kv_layout": "v4"}, {"page_size": 8}]
)
def test_pools_of_other_bytes_do_not_fit(other: dict[str, Any]) -> None:
    assert differences(pool(args()).layout, pool(args(**other)).layout)
    assert not differences(pool(args()).layout, pool(args()).layout)


def test_a_rank_fits_only_the_rank_of_its_number() -> None:
    first, second = (pool(args(), rank=rank, ranks=2).layout for rank in range(2))
    assert "rank 1 of 2" in "".join(differences(first, second))


def buffers(count: int, **fields: Any) -> Any:
    return args(
        kv_data_ptrs=[4096 * (number + 1) for number in range(count)],
        kv_data_lens=[1024] * count,
        **{"kv_item_lens": [64] * count, **fields},
    )


def test_heads_are_divided_among_the_ranks() -> None:
    """Two ranks of prefill have the heads of one rank of decode between them."""
    decode = pool(buffers(4, kv_item_lens=[128] * 4), kv_heads=4).layout
    first, second = (pool(buffers(4), rank=r, ranks=2, kv_heads=4).layout for r in range(2))
    assert [c.shape for c in (decode.components[0], first.components[0])] == [(4, 8), (2, 8)]
    assert [(c.start, c.whole) for c in second.components] == [(2, 4)] * 4
    one, other = served_of(first), served_of(second)
    assert not uncovered(decode, [one, other])
    assert uncovered(decode, [one]) and uncovered(decode, [one, one])
    assert not uncovered(first, [one]) and uncovered(first, [other])


@pytest.mark.parametrize(
    ("given", "is_mla", "heads"),
    [
        (buffers(4), True, 4),
        (buffers(4), False, 0),
        (buffers(4), False, 1),
        (buffers(4), False, 6),
        (buffers(4, kv_layout="v4"), False, 4),
        (buffers(4, num_draft_entries=2), False, 4),
    ],
    ids=["MLA", "unknown order", "fewer heads than ranks", "uneven", "named layout", "a draft"],
)
def test_other_caches_have_no_parts(given: Any, is_mla: bool, heads: int) -> None:
    (first, second) = (
        pool(given, rank=rank, ranks=2, is_mla=is_mla, kv_heads=heads).layout for rank in range(2)
    )
    assert {c.unit for c in first.components} == {"page"}
    assert "rank 1 of 2" in "".join(differences(first, second))


def names(given: Any, *, is_mla: bool = False) -> list[str]:
    return [c.name for c in pool(given, is_mla=is_mla).layout.components]


def test_buffers_are_named_by_layer() -> None:
    assert names(buffers(4)) == ["k0", "k1", "v0", "v1"]
    assert names(buffers(2), is_mla=True) == ["kv0", "kv1"]
    stage = buffers(4, prefill_start_layer=2)
    assert names(stage) == ["k2", "k3", "v2", "v3"]
    assert names(buffers(6, num_draft_entries=2)) == ["k0", "k1", "v0", "v1", "draft0", "draft1"]
    with pytest.raises(LayoutError, match="3 buffers, and K and V need an even number"):
        pool(buffers(3))


def test_a_decode_holds_all_stages() -> None:
    whole = pool(buffers(4)).layout
    for first in range(2):
        stage = pool(buffers(2, prefill_start_layer=first)).layout
        assert differences(stage, whole) and not differences(stage, whole, partly=True)
    beyond = pool(buffers(2, prefill_start_layer=2)).layout
    assert differences(beyond, whole, partly=True)


def test_caches_that_are_compressed_by_layer_are_refused() -> None:
    with pytest.raises(MisuseError, match="compressed by layer"):
        pool(args(mla_compression_ratios=[0, 4]))


def with_states(*kinds: str, **fields: Any) -> Any:
    count = len(kinds)
    return args(
        state_types=[SimpleNamespace(value=kind) for kind in kinds],
        state_data_ptrs=[[16384 + 4096 * n, 16640 + 4096 * n] for n in range(count)],
        state_data_lens=[[256, 256]] * count,
        state_item_lens=[[32, 64]] * count if fields.pop("uneven", False) else [[32, 32]] * count,
        **fields,
    )


def test_each_kind_of_state_is_a_space() -> None:
    layout = pool(with_states("swa", "mamba", "dsa"), window=100).layout
    assert layout.spaces == (
        Space("pages", 16, 4),
        Space("swa", 8, 4, 100),
        Space("mamba", 8, 0),
        Space("dsa", 8, 4),
    )
    assert layout.place_bytes == (128, 64, 64, 64)
    other = pool(with_states("swa", "mamba", "dsa"), window=99).layout
    assert "swa: window: prefill 100, decode 99" in "".join(differences(layout, other))
    with pytest.raises(LayoutError, match="'swa1' has 4 pages, 'swa0' has 8"):
        pool(with_states("swa", uneven=True), window=100)


@pytest.mark.parametrize(
    ("kinds", "options", "text"),
    [
        (["minimax_index_k", "swa", "c128_state"], {}, "the kind minimax_index_k, c128_state"),
        (["mamba", "mamba"], {}, "two states of one kind among mamba, mamba"),
        (["mamba"], {"stages": 2}, "--pp-size above 1 with state of the kinds mamba"),
        (["swa"], {"window": 0}, "of the kind swa, and SGLang names no sliding window"),
    ],
)
def test_states_are_refused_by_name(kinds: list[str], options: Any, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        pool(with_states(*kinds), **{"window": 100, **options})


def test_states_outside_the_shared_segment_are_refused() -> None:
    segment = SharedSegment.create(4096)
    with pytest.raises(MisuseError, match="the kind mamba outside the shared segment"):
        pool(with_states("mamba"), segment=segment)
    segment.close()


def test_a_list_of_places_has_the_states_after_the_pages() -> None:
    layout = pool(with_states("swa", "mamba"), window=100).layout
    found = places_of(layout, np.array([3, 1]), [np.array([2, 0]), [np.array([5])]])
    assert found.tolist() == [3, 1, 16 + 2, 16, 16 + 8 + 5]
    assert places_of(layout, [3, 1]).tolist() == [3, 1]
    assert places_of(layout, [3], [None, [7]]).tolist() == [3, 16 + 8 + 7]


def test_buffers_that_are_no_pool_are_refused() -> None:
    with pytest.raises(LayoutError, match="no buffers"):
        pool(args(kv_data_ptrs=[], kv_data_lens=[], kv_item_lens=[]))
    with pytest.raises(LayoutError, match="'v0' has 8 pages, 'k0' has 16"):
        pool(args(kv_data_lens=[1024, 512]))


def test_devices_have_kvflows_names() -> None:
    assert (device_of("cpu", 3), device_of("cuda", 3)) == ("cpu", "cuda:3")
    with pytest.raises(MisuseError, match="not on npu"):
        device_of("npu", 0)


def test_models_are_told_apart_by_their_files(tmp_path: Any) -> None:
    found = model_fingerprint(str(DEMO_MODEL_DIR))
    assert found.startswith("config ") and " weights " in found
    assert model_fingerprint(str(tmp_path)) == "unread"


def slots(sizes: list[int], count: int = 4) -> tuple[MetadataSlots, list[Any]]:
    buffers = [np.zeros((count, size), np.uint8) for size in sizes]
    found = MetadataSlots([b.ctypes.data for b in buffers], [b.nbytes for b in buffers], sizes)
    return found, buffers


def test_a_slot_travels_whole_and_alone() -> None:
    (source, ours), (target, theirs) = slots([8, 64]), slots([8, 64])
    ours[0][1], ours[1][1], ours[1][2] = 3, 4, 9
    target.write(2, source.read(1))
    assert theirs[0].tolist() == [[0] * 8, [0] * 8, [3] * 8, [0] * 8]
    assert theirs[1][2].tolist() == [4] * 64 and theirs[1].sum() == 4 * 64


@pytest.mark.parametrize(
    "handoff",
    [b"", b"\xff", msgspec.msgpack.encode(["text"]), msgspec.msgpack.encode([b"x" * 8])],
)
def test_what_is_no_slot_writes_nothing(handoff: bytes) -> None:
    target, buffers = slots([8, 64])
    with pytest.raises(WireError):
        target.write(0, handoff)
    assert not any(b.any() for b in buffers)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_outside_the_buffers_is_refused(slot: int) -> None:
    found, _ = slots([8])
    with pytest.raises(MisuseError, match=r"outside 0\.\.3"):
        found.read(slot)
    with pytest.raises(MisuseError, match=r"outside 0\.\.3"):
        found.write(slot, msgspec.msgpack.encode([b"x" * 8]))


def test_metadata_that_is_too_large_is_refused_at_start() -> None:
    with pytest.raises(MisuseError, match="has 1048587 bytes, limit 1048576"):
        MetadataSlots([4096], [2 << 20], [(1 << 20) + 1])


def request(*ids: int, media: object = None, **fields: Any) -> Any:
    return SimpleNamespace(
        origin_input_ids=array("q", ids), multimodal_inputs=media, output_ids=[], **fields
    )


def test_the_prompt_is_that_of_the_token_ids() -> None:
    assert prompt_of(request(1, 2, 3)) == check_prompt([1, 2, 3])
    assert prompt_of(request(1, 2, 3)) != prompt_of(request(1, 2, 4))


def test_a_retracted_prompt_has_what_was_generated() -> None:
    retracted = request(1, 2, pd_rebootstrap_in_progress=True)
    retracted.output_ids = [3, 4]
    assert prompt_of(retracted) == check_prompt([1, 2, 3, 4])


def test_media_are_compared_by_their_length() -> None:
    one, other = request(1, 2, 3, media="seen"), request(4, 5, 6, media="seen")
    assert prompt_of(one) == prompt_of(other)
    assert prompt_of(one) != prompt_of(request(1, 2, media="seen"))
    assert prompt_of(one) != prompt_of(request(1, 2, 3))


def test_a_prompt_is_there_for_its_request_only() -> None:
    slot = PromptSlot()
    with slot.holding(request(1, 2)):
        assert slot.take() == check_prompt([1, 2])
    with pytest.raises(MisuseError, match="no known request"):
        slot.take()
    with slot.holding(request()), pytest.raises(MisuseError, match="the prompt is empty"):
        slot.take()


def ranks(count: int) -> list[RankInfo]:
    own = RankInfo(0, 1, 5, "tcp://127.0.0.1:1", "local", "m")
    return [
        listed(msgspec.structs.replace(own, incarnation=number), number, count)
        for number in range(count)
    ]


async def test_a_rank_finds_its_counterpart() -> None:
    assert [(each.rank, each.world_size) for each in ranks(2)] == [(0, 2), (1, 2)]

    async def resolve(prefill: str) -> list[RankInfo]:
        assert prefill == "10.0.0.1:8998"
        return ranks(3)

    (found,) = await resolver(resolve, 2, 3)("10.0.0.1:8998")
    assert (found.rank, found.world_size, found.incarnation) == (0, 1, 2)


def test_a_rank_finds_all_stages() -> None:
    """Two ranks by two stages: the stages of a rank stand together."""
    own = RankInfo(0, 2, 5, "tcp://127.0.0.1:1", "local", "m")
    every = [
        listed(msgspec.structs.replace(own, incarnation=10 * rank + stage), 2 * rank + stage, 4)
        for rank in range(2)
        for stage in range(2)
    ]
    assert [(each.rank, each.world_size) for each in every] == [(n, 4) for n in range(4)]
    for rank in range(2):
        found = counterpart(every, rank, 2)
        assert [each.incarnation for each in found] == [10 * rank, 10 * rank + 1]
        assert [(each.rank, each.world_size) for each in found] == [(0, 2), (1, 2)]


def test_ranks_that_share_the_heads_of_one_rank_stand_together() -> None:
    for rank in range(2):
        found = counterpart(ranks(4), rank, 2)
        assert [each.incarnation for each in found] == [2 * rank, 2 * rank + 1]
        assert [(each.rank, each.world_size) for each in found] == [(0, 2), (1, 2)]


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(PeerError) as raised:
        counterpart(ranks(3), 0, 2)
    assert "has 3 ranks, and this decode has 2: kvflow's backend needs the" in str(raised.value)
