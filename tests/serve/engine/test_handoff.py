"""The handoff: what it may carry, and that every field stays that of its request."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvflow import DecodeNode, HandOff, MisuseError, PackedArray, PrefillNode
from kvflow.memory.pool import PagedPool
from kvflow.node.handoff import MAX_DRAFT_ENTRIES, MAX_HIDDEN_BYTES
from kvflow.node.prompt_logprobs import PromptLogprobs
from kvflow.protocols.errors import WireError
from kvflow.serve.engine.scheduler.handoff import check_handoff
from kvflow.serve.engine.scheduler.params import SamplingParams
from kvflow.testing.pair import QUICK, pair, small_layout
from kvflow.transports.data.fake import FakeNetwork, FakePlane

LATER = 1_000
VOCABULARY, HIDDEN, PROMPT = 1_000, 96, 5
NUMPY_DTYPES = ["<f4", ">f4", "<f2", "<i4", ">i4", "<i8", ">i8"]


@given(
    arrays.arrays(
        st.sampled_from(NUMPY_DTYPES), arrays.array_shapes(max_dims=4, max_side=5), unique=False
    )
)
def test_an_array_comes_back_as_it_was(array: Any) -> None:
    packed = PackedArray.of(array)
    assert packed.fault == ""
    np.testing.assert_array_equal(packed.array(), array)
    assert not packed.array().flags.writeable
    turned = PackedArray.of(array.T)
    np.testing.assert_array_equal(turned.array(), array.T)
    np.testing.assert_array_equal(packed.tensor().numpy(), array)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64]
)
def test_so_does_a_tensor_of_any_strides(dtype: torch.dtype) -> None:
    whole = torch.arange(48).reshape(4, 12).to(dtype)
    for tensor in (
        whole,
        whole.T,
        whole[1:, ::3],
        whole.clone().requires_grad_(dtype.is_floating_point),
    ):
        packed = PackedArray.of(tensor)
        assert (packed.fault, packed.shape) == ("", tuple(tensor.shape))
        assert torch.equal(packed.tensor(), tensor) and packed.tensor().dtype == dtype
        np.testing.assert_array_equal(packed.floats(), tensor.detach().float().numpy())
    bits = PackedArray.of(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).array()
    assert bits.tolist() == [
        struct.unpack("<I", struct.pack("<f", x))[0] >> 16 for x in (1.0, -2.0)
    ]


@pytest.mark.parametrize(
    "array", [np.zeros(3, np.uint16), np.zeros(3), torch.zeros(3, dtype=torch.bool), [1.0, 2.0]]
)
def test_what_cannot_be_packed_is_said_at_once(array: Any) -> None:
    with pytest.raises(
        MisuseError,
        match="cannot be handed over; use one of float32, float16, bfloat16, int32, int64",
    ):
        PackedArray.of(array)


def draft(probabilities: Any = None, ids: Any = None) -> dict[str, Any]:
    return {
        "draft_probabilities": PackedArray.of(
            np.array([0.5, 0.25], "f4") if probabilities is None else probabilities
        ),
        "draft_token_ids": PackedArray.of(np.array([7, 8]) if ids is None else ids),
    }


def hidden(*shape: int, dtype: str = "f4") -> dict[str, Any]:
    return {"hidden_states": PackedArray.of(np.zeros(shape, dtype))}


def states(dtype: str, shape: tuple[int, ...], size_bytes: int) -> dict[str, Any]:
    """What `PackedArray.of` would not make."""
    return {"hidden_states": PackedArray(dtype, shape, bytes(size_bytes))}


MANY = MAX_DRAFT_ENTRIES + 1
WRONG: list[tuple[dict[str, Any], str]] = [
    (hidden(8), r"hidden_states: \(8,\) of float32 are not \[tokens, hidden\]"),
    (
        hidden(1, 8, dtype="i4"),
        r"hidden_states: \(1, 8\) of int32 are not \[tokens, hidden\] of floating-point",
    ),
    (hidden(PROMPT + 1, 8), r"hidden_states: of 6 tokens, limit 5 \(the prompt\)"),
    (
        hidden(1, MAX_HIDDEN_BYTES // 4 + 1),
        f"hidden_states: {MAX_HIDDEN_BYTES + 4} bytes, limit {MAX_HIDDEN_BYTES}",
    ),
    (states("float64", (1, 1), 8), "hidden_states: its dtype 'float64' is not one of"),
    (states("float32", (1, 2), 7), r"hidden_states: 7 bytes are given, 8 make \(1, 2\)"),
    (states("float32", (1, 0), 0), r"hidden_states: its shape \(1, 0\)"),
    (states("float32", (-1, -2), 8), r"hidden_states: its shape \(-1, -2\)"),
    (states("float32", (1,) * 9, 4), r"hidden_states: its shape \(1, 1, 1, 1, 1\) is"),
    (states("float32", (1 << 62, 1 << 62), 0), "hidden_states: 0 bytes are given"),
    ({"draft_token_ids": draft()["draft_token_ids"]}, "draft_probabilities: missing"),
    ({"draft_probabilities": draft()["draft_probabilities"]}, "draft_token_ids: missing"),
    (
        draft(np.zeros(2, "f2")),
        "draft_probabilities, draft_token_ids: float16 and int64, not float32 and int32 or",
    ),
    (draft(None, np.zeros(2, "f4")), "draft_probabilities, draft_token_ids: float32 and float32"),
    (
        draft(np.zeros(3, "f4")),
        r"draft_token_ids: \(2,\), and \(3,\) of probabilities, are not \[k\] or \[steps, k\]",
    ),
    (draft(np.zeros((1, 1, 2), "f4"), np.zeros((1, 1, 2), "i4")), r"draft_token_ids: \(1, 1, 2\)"),
    (
        draft(np.zeros(MANY, "f4"), np.zeros(MANY, "i4")),
        f"draft_probabilities: {MANY} entries, limit {MANY - 1}",
    ),
    (draft(np.array([0.5, 1.01], "f4")), r"draft_probabilities: a number is outside 0\.\.1"),
    (draft(np.array([0.5, np.nan], "f4")), r"draft_probabilities: a number is outside 0\.\.1"),
    (draft(None, np.array([3, -1])), "draft_token_ids: a token id is below 0"),
]


def test_a_handoff_that_is_nested_too_deep_is_refused() -> None:
    """In a field that this version does not know, and would skip."""
    good = HandOff(first_token=1, prompt_tokens=PROMPT).encode()
    deep = bytes([good[0] + 1]) + good[1:] + b"\xa3new" + b"\x91" * 60_000 + b"\x01"
    with pytest.raises(
        WireError, match=f"cannot decode a {len(deep)}-byte handoff: maximum recursion depth"
    ):
        HandOff.decode(deep)


@pytest.mark.parametrize(("fields", "text"), WRONG, ids=[text for _, text in WRONG])
def test_both_sides_name_the_field_and_its_limit(fields: dict[str, Any], text: str) -> None:
    made = HandOff(first_token=1, prompt_tokens=PROMPT, **fields)
    with pytest.raises(MisuseError, match=f"the handoff's {text}"):
        made.encode()
    with pytest.raises(WireError, match=f"the handoff's {text}"):
        HandOff.decode(msgspec.msgpack.encode(made))


def test_it_is_for_one_model() -> None:
    made = HandOff.decode(
        HandOff(first_token=1, prompt_tokens=PROMPT, **hidden(1, 8), **draft()).encode()
    )
    made.check_fits(PROMPT, 9, 8)
    check_handoff(made, PROMPT, SamplingParams(), 9)
    with pytest.raises(WireError, match=r"draft_token_ids name tokens outside 0\.\.7"):
        check_handoff(made, PROMPT, SamplingParams(), 8)
    with pytest.raises(
        WireError, match="hidden_states are of 8 numbers a token, those of the model of 16"
    ):
        made.check_fits(PROMPT, 9, 16)


def test_the_largest_fits_into_a_message() -> None:
    made = HandOff(
        first_token=1,
        prompt_tokens=PROMPT,
        **hidden(1, MAX_HIDDEN_BYTES // 4),
        **draft(np.ones(MAX_DRAFT_ENTRIES, "f4"), np.ones(MAX_DRAFT_ENTRIES, "i8")),
    )
    assert HandOff.decode(made.encode()) == made


class Buffers:
    """An engine's output buffers: every request overwrites those of the one before."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self.hidden = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
        self.probabilities, self.ids = np.zeros((2, 8), "f4"), np.zeros((2, 8), "i8")

    def hand_over(self, number: int) -> HandOff:
        random = self._random
        self.hidden.copy_(torch.from_numpy(random.standard_normal((2, HIDDEN))))
        self.probabilities[:] = random.random((2, 8))
        self.ids[:] = random.integers(0, VOCABULARY, (2, 8))
        scores = random.standard_normal((3, PROMPT - 1))
        top = tuple((int(token), float(-score)) for token, score in enumerate(random.random(3)))
        return HandOff(
            first_token=number % VOCABULARY,
            logprob=float(-random.random()),
            top_logprobs=top,
            asked_logprobs=top[:1],
            prompt_tokens=PROMPT,
            cached_tokens=number % PROMPT,
            prompt_logprobs=PromptLogprobs.pack(
                0, scores[0], self.ids[0, :4], scores[1], scores[2]
            ),
            hidden_states=PackedArray.of(self.hidden),
            draft_probabilities=PackedArray.of(self.probabilities),
            draft_token_ids=PackedArray.of(self.ids),
        )


def values(handoff: HandOff) -> list[Any]:
    fields = {name: getattr(handoff, name) for name in handoff.__struct_fields__}
    assert None not in fields.values(), "a field that no handoff sets is not looked at"
    return [
        [name, one.array().tolist() if isinstance(one, PackedArray) else msgspec.to_builtins(one)]
        for name, one in fields.items()
    ]


Open = Callable[[int], Any]


@asynccontextmanager
async def in_memory() -> AsyncIterator[tuple[PrefillNode, Open]]:
    async with pair() as made:
        yield made.prefill, lambda room: made.decode.room(room, "sim", range(PROMPT))


@asynccontextmanager
async def over_zmq() -> AsyncIterator[tuple[PrefillNode, Open]]:
    planes = FakeNetwork()
    pools = [PagedPool.allocate(small_layout(), shared=False) for _ in range(2)]
    try:
        async with (
            PrefillNode(pools[0], FakePlane(planes), timing=QUICK) as prefill,
            DecodeNode(pools[1], FakePlane(planes), timing=QUICK) as decode,
        ):
            yield prefill, lambda room: decode.room(room, [prefill.info], range(PROMPT))
    finally:
        for pool in pools:
            pool.close()


async def hand_over(node: PrefillNode, open_room: Open, room: int, handoff: bytes) -> bytes:
    source = node.room(room, range(PROMPT))
    async with await open_room(room) as target:
        await source.matched()
        pages = node.pages.take(2, room)
        source.send(pages, last=True, handoff=handoff)
        landed: bytes = await target.landed()
    await source.done()
    node.pages.give_back(pages, room)
    return landed


Read = Callable[[bytes], HandOff]


async def changed_after(
    later: int, connected: Any, read: Read, random: np.random.Generator
) -> list[str]:
    """Return the changed fields of the first handoffs after `later` more."""
    buffers, kept = Buffers(random), list[tuple[HandOff, list[Any]]]()
    async with connected() as (node, open_room):
        for room in range(8 + later):
            made = buffers.hand_over(room)
            told = values(made)
            found = read(await hand_over(node, open_room, room, made.encode()))
            if room < 8:
                kept.append((found, told))
    return [
        now[0]
        for found, told in kept
        for now, then in zip(values(found), told, strict=True)
        if now != then
    ]


@pytest.mark.parametrize("connected", [in_memory, over_zmq])
async def test_no_field_changes_with_a_thousand_later_handoffs(
    connected: Any, request: pytest.FixtureRequest
) -> None:
    random = np.random.default_rng(request.config.option.seed)
    assert await changed_after(LATER, connected, HandOff.decode, random) == []


async def test_a_view_into_a_slot_would_be_seen() -> None:
    """The negative control: a reader keeps views of one buffer."""
    slot = bytearray(1 << 20)

    def read(data: bytes) -> HandOff:
        made = HandOff.decode(data)
        states = made.hidden_states
        assert states is not None
        slot[: len(states.data)] = states.data
        view: Any = memoryview(slot)[: len(states.data)]
        return msgspec.structs.replace(
            made, hidden_states=PackedArray(states.dtype, states.shape, view)
        )

    assert (
        await changed_after(3, in_memory, read, np.random.default_rng(1)) == ["hidden_states"] * 8
    )


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_what_is_read_is_no_view_of_the_bytes(seed: int) -> None:
    buffers = Buffers(np.random.default_rng(seed))
    made = buffers.hand_over(3)
    told = values(made)
    frame = bytearray(made.encode())
    found: Any = HandOff.decode(frame)  # type: ignore[arg-type]
    frame[:] = b"\xff" * len(frame)
    buffers.hand_over(4)
    assert values(made) == values(found) == told


def test_a_reader_of_before_skips_what_it_does_not_know() -> None:
    class Before(msgspec.Struct, frozen=True, tag="handoff.v1", kw_only=True):
        first_token: int
        prompt_tokens: int

    made = HandOff(first_token=1, prompt_tokens=PROMPT, **hidden(1, 8), **draft())
    before = Before(first_token=1, prompt_tokens=PROMPT)
    assert msgspec.msgpack.decode(made.encode(), type=Before) == before
    assert HandOff.decode(msgspec.msgpack.encode(before)).hidden_states is None
