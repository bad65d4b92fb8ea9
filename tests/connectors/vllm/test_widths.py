"""Prefills and decodes with different numbers of workers, over real nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

import kvflow
from kvflow.connectors.vllm.groups import Group, Groups
from kvflow.connectors.vllm.memory import Share, pool_over
from kvflow.connectors.vllm.widths import Heads, Place, served_by
from kvflow.memory.pool import PagedPool
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import Space

BLOCKS, SLOTS, WIDTH, LAYERS = 8, 4, 3, 3
PROMPT = np.arange(2 * SLOTS, dtype=np.uint32)
GROUPS = Groups(
    [Group(0, tuple(f"layer.{n}" for n in range(LAYERS)), Space("pages", BLOCKS, SLOTS))]
)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.__version__ = "0.32.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


class Cache:
    """One worker's layers, [blocks, heads, slots, width], in a segment of their own."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        shape = (LAYERS, BLOCKS, heads.held or 1, SLOTS, WIDTH)
        count = int(np.prod(shape))
        self.segment = kvflow.SharedSegment.create(4 * count)
        memory = torch.frombuffer(self.segment.memory, dtype=torch.float32, count=count)
        self.layers = {f"layer.{n}": each for n, each in enumerate(memory.view(shape))}

    def fill(self) -> None:
        """What every head of the model has: its layer, its number, block and slot."""
        for n, layer in enumerate(self.layers.values()):
            layer[:] = self.content(n)

    def content(self, layer: int) -> torch.Tensor:
        heads = torch.arange(self.heads.start, self.heads.start + (self.heads.held or 1))
        places = torch.arange(BLOCKS * SLOTS).view(BLOCKS, 1, SLOTS, 1)
        return (1 + layer * 1000 + heads.view(1, -1, 1, 1) * 100 + places).float()

    def pool(self, share: Share | None) -> PagedPool:
        return pool_over(
            [self.layers],
            GROUPS,
            layout="cpu HND",
            fingerprint="tiny",
            segment=self.segment,
            share=share,
        )


def prefill_nodes(
    stack: ExitStack, total: int, shards: int, workers: int
) -> dict[int, list[kvflow.PrefillThread]]:
    """The nodes of all workers of a prefill, by the worker of decode that they serve."""
    found: dict[int, list[kvflow.PrefillThread]] = {}
    for shard in range(shards):
        served, held = served_by(Place(shard, shards), workers), Heads(total, shard, shards)
        cache = Cache(held)
        cache.fill()
        for number in range(served.serves):
            share = Share(held, held.divided(served.serves, number), served.size, "")
            alone: dict[str, Any] = (
                {} if served.size == 1 else {"rank": served.rank, "world_size": served.size}
            )
            node = kvflow.PrefillThread(cache.pool(share), "local", **alone)
            node.start()
            stack.callback(node.close)
            found.setdefault(served.first + number, []).append(node)
    return found


@pytest.mark.parametrize("total", [8, 2, 0], ids=["heads", "fewer heads than workers", "MLA"])
@pytest.mark.parametrize(
    ("shards", "workers"), [(4, 1), (4, 2), (2, 2), (1, 2), (1, 4), (2, 4)], ids=str
)
def test_every_worker_of_decode_has_its_heads(total: int, shards: int, workers: int) -> None:
    with ExitStack() as stack:
        nodes = prefill_nodes(stack, total, shards, workers)
        assert sorted(nodes) == list(range(workers))
        for worker in range(workers):
            held = Heads(total, worker, workers)
            cache = Cache(held)
            share = Share(held, held, 1, "") if workers > 1 else None
            decode = kvflow.DecodeThread(cache.pool(share), "local")
            decode.start()
            stack.callback(decode.close)
            _move(decode, nodes[worker])
            for n, layer in enumerate(cache.layers.values()):
                wanted = torch.zeros_like(layer)
                wanted[[6, 1]] = cache.content(n)[[3, 4]]
                assert torch.equal(layer, wanted), f"worker {worker}, layer {n}"


def _move(decode: kvflow.DecodeThread, prefill: list[kvflow.PrefillThread]) -> None:
    """Blocks 3 and 4 of prefill's go into 6 and 1 of decode's."""
    sending = [node.open(7, prompt=PROMPT) for node in prefill]
    infos = [node.info for node in prefill]
    room = decode.open(7, prefill=infos, prompt=PROMPT, pages=[6, 1])
    for node, half in zip(prefill, sending, strict=True):
        for event in _events(node):
            if event.kind == "matched":
                half.send([3, 4], last=True)
    for _ in _events(decode):
        pass
    assert room.error is None and room.landed, room.error


def _events(node: Any) -> Iterator[Any]:
    """Those of the node's only room, until it is released."""
    while True:
        for event in node.poll(timeout_s=20.0):
            yield event
            if event.kind == "released":
                return


@pytest.mark.parametrize(
    ("shards", "stages", "workers"),
    [(4, 1, 1), (4, 1, 2), (2, 1, 2), (1, 1, 2), (2, 1, 4), (4, 2, 1), (4, 2, 2), (2, 2, 4)],
)
def test_ports_differ_and_decode_finds_its_leader_at_its_own_number(
    shards: int, stages: int, workers: int
) -> None:
    ports, leaders = [], {}
    for rank in range(shards * stages):
        stage, shard = divmod(rank, shards)
        served = served_by(Place(shard, shards, stage, stages), workers)
        for number in range(served.serves):
            ports.append(served.port_offset(number))
            if served.is_leader:
                leaders[served.first + number] = ports[-1]
    assert len(set(ports)) == len(ports)
    assert leaders == {worker: worker for worker in range(workers)}


def test_decodes_have_as_many_workers_as_prefill_unless_told() -> None:
    assert served_by(Place(1, 2, 1, 2), None) == served_by(Place(1, 2, 1, 2), 4)
    assert served_by(Place(0), None) == served_by(Place(0), 1)


@pytest.mark.parametrize(
    ("shards", "stages", "workers"), [(4, 1, 3), (2, 1, 3), (3, 1, 2), (2, 2, 8)]
)
def test_workers_that_cannot_be_divided_are_refused(shards: int, stages: int, workers: int) -> None:
    with pytest.raises(MisuseError, match=f"decode_workers {workers}: neither a divisor"):
        served_by(Place(0, shards, 0, stages), workers)


def test_what_is_divided_in_another_way_is_refused_by_name() -> None:
    held = Heads(8, 0, 2)
    cache = Cache(held)
    cache.layers = {name: layer[:, :1] for name, layer in cache.layers.items()}
    with pytest.raises(MisuseError, match=r"how layer\.0 of 'pages' is divided among workers"):
        cache.pool(Share(held, held, 2, ""))
    tokens_first = Cache(held)
    tokens_first.layers = {
        name: torch.zeros(BLOCKS, SLOTS, held.held, WIDTH).transpose(1, 2)
        for name in tokens_first.layers
    }
    with pytest.raises(MisuseError, match="VLLM_KV_CACHE_LAYOUT=HND"):
        tokens_first.pool(Share(held, held.divided(2, 1), 1, ""))
