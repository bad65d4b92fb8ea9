"""One state of the walk over the prefix index: the shipped index, and the world around it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvflow.proof.walk.cache_worlds import Prompt
from kvflow.protocols.cache.choices import EvictionPolicy
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.cache.nodes import Node, Root, Run, upwards
from kvflow.protocols.cache.policies import POLICIES, policy_key
from kvflow.protocols.cache.residents import Freed
from kvflow.protocols.pages.layout import PageIndices
from kvflow.testing.subscriber import Subscriber, block_hash, digests_of_prompt

POOL = 16  # number of pages on the device and on the host, more than any world needs
POLICY: EvictionPolicy = "lru"


class Copy(NamedTuple):
    """One write, as its caller knows it. `epoch` is the number of flushes before it began."""

    epoch: int
    source: Tier
    target: Tier
    keys: tuple[Prompt, ...]  # for each page, the prefix that ends with it
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]


class Lock(NamedTuple):
    node: Node
    epoch: int
    key: Prompt
    pages: tuple[int, ...]


class Life:
    """The index with its memory, store, copies, locks and subscriber.

    It is pickled as one object graph, so that a restored lock refers to a node of the restored
    index.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex(1, POLICY, events=True)
        # For each tier: page in use -> the prefix whose last page it holds.
        self.memory: tuple[dict[int, Prompt], dict[int, Prompt]] = ({}, {})
        self.store: set[Prompt] = set()
        self.copies: dict[int, Copy] = {}
        self.locks: list[Lock] = []
        self.subscriber = Subscriber()
        self.inserted: frozenset[Prompt] = frozenset()  # prompts inserted since the last flush
        self.epoch = self.last_ended = 0

    def frozen(self) -> bytes:
        stream = io.BytesIO()
        _Pickler(stream, protocol=5).dump(self)
        return stream.getvalue()

    @staticmethod
    def thawed(data: bytes) -> Life:
        life: Life = pickle.loads(data)
        return life

    def take(self, tier: Tier, keys: list[Prompt]) -> PageIndices:
        """Take the lowest free pages of `tier` for the contents `keys`, where () means garbage."""
        memory = self.memory[tier]
        free = [page for page in range(POOL) if page not in memory][: len(keys)]
        assert len(free) == len(keys), "the world's pools are too small"
        memory.update(zip(free, keys, strict=True))
        return np.array(free, np.int32)

    def give_back(self, freed: Freed) -> None:
        for memory, pages in zip(self.memory, (freed.device, freed.host), strict=True):
            for page in pages.tolist():
                if memory.pop(page, None) is None:
                    raise AssertionError(f"I1: page {page} comes back twice")

    def nodes(self) -> list[Node]:
        """Return the nodes that the tree, a lock or a write reaches, flushed ones included."""
        found: dict[int, Node] = {}
        waiting: list[Node] = [
            *self.index._residents.roots.values(),
            *(lock.node for lock in self.locks),
        ]
        for write in self.index._writes._open.values():
            for piece in write.pieces:
                waiting.extend(piece.run.nodes)
        while waiting:
            node = waiting.pop()
            if id(node) not in found:
                found[id(node)] = node
                waiting.extend(node.children.values())
                if node.parent is not None:
                    waiting.append(node.parent)
        return [node for node in found.values() if not isinstance(node, Root)]

    def fingerprint(self) -> tuple[Any, ...]:
        """Return a key that is equal for lives with the same future.

        It leaves out the numbers of pages and writes. The rules have checked the pages of this life
        by then, and no later step depends on these numbers.
        """
        paths = {id(node): (node.detached, path_of(node)) for node in self.nodes()}
        assert len(set(paths.values())) == len(paths), "two nodes of one path"
        runs: dict[int, tuple[Any, ...]] = {}

        def run_name(run: Run) -> tuple[Any, ...]:
            return runs.setdefault(id(run), paths[id(run.nodes[0])]) if run.nodes else ()

        nodes = sorted(
            (
                *paths[id(n)],
                n.num_pages,
                run_name(n.run),
                n.start,
                *n.phase,
                *n.readers,
                *n.below,
                n.locks,
                n.pins,
                n.told,
                n.queued,
                n.frayed,
            )
            for n in self.nodes()
        )
        queues = tuple(
            tuple(paths[id(node)] for _, _, node in sorted(queue) if id(node) in paths)
            for queue in self.index._residents._queues
        )
        writes = sorted(
            (
                copy.epoch,
                copy.source,
                copy.target,
                copy.keys,
                tuple(
                    (run_name(p.run), p.start, p.stop)
                    for p in self.index._writes._open[number].pieces
                ),
            )
            for number, copy in self.copies.items()
            if number in self.index._writes._open
        )
        locks = sorted((lock.epoch, lock.key) for lock in self.locks)
        told = tuple(frozenset(held) for held in self.subscriber.blocks)
        rest = (
            self.index._residents.num_pinned,
            self.epoch,
            self.last_ended > 0,
            frozenset(self.store),
            self.inserted,
        )
        return (tuple(nodes), queues, tuple(writes), tuple(locks), told, rest)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Pickle the eviction policy as its key, since pickle cannot import it by name."""
        return (policy_key, (POLICY,)) if value is POLICIES[POLICY] else NotImplemented


def path_of(node: Node) -> Prompt:
    """Return the prompt that leads from the root to the end of `node`."""
    parts = [np.frombuffer(part.tokens, "<u4")[: part.num_pages].tolist() for part in upwards(node)]
    return tuple(page for part in reversed(parts) for page in part)


def prefixes(prompt: Prompt) -> Iterator[Prompt]:
    return (prompt[: n + 1] for n in range(len(prompt)))


@cache
def name_of(key: Prompt) -> int:
    """Return the hash by which events name the last page of `key`."""
    return block_hash(digests_of_prompt(key, 1)[-1])


@cache
def key_bytes(prompt: Prompt) -> bytes:
    return token_bytes(prompt)
