"""A router that follows the cache events of workers with real indexes and publishers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq

from kvflow.http.bodies import decoded
from kvflow.http.large_bodies import take_apart
from kvflow.protocols.cache.choices import Dialect
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import ANY, TOKEN_BYTES, Namespace, page_hashes, token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.cache.stream import StreamLimits
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.kv_events import (
    AllBlocksCleared,
    RemovedBlocks,
    StoredBlocks,
    media_of,
    read_batch,
)
from kvflow.router import blocks as blocks_module
from kvflow.router import feed as feed_module
from kvflow.router import tokens as tokens_module
from kvflow.router.blocks import KnownBlocks
from kvflow.router.feed import BlockFeed, Source, source_of
from kvflow.router.policies import Policy
from kvflow.router.prompts import PromptFields
from kvflow.router.tokens import MAX_CHARACTERS, block_hashes
from kvflow.serve.cache.publisher import EventPublisher
from kvflow.serve.http.tokenizer import ThreadedTokenizer
from kvflow.testing.pair import until as soon
from kvflow.transports.control.curve import ControlKey, read_key, write_key
from tests.fakes.servers import Front, labelled
from tests.fakes.service import NO_CACHE, FakeService, Meeting, Role
from tests.protocols.cache.subscriber import block_hash, digest_chain

WITHIN_S = 20.0
PAGE = 16
FREE = "tcp://127.0.0.1:*"


class Cache:
    def __init__(self, page_size: int = PAGE, **keywords: Any) -> None:
        self.index = PrefixIndex(page_size, events=True)
        self._now = 0.0
        given: dict[str, Any] = {"address": FREE, "replay_address": FREE, "heartbeat_s": 0.02}
        self.publisher = EventPublisher(self.index, page_size, **given | keywords)

    @property
    def source(self) -> Source:
        found = source_of("http://127.0.0.1:1", self.publisher.describe(), self.index.page_size)
        assert found is not None
        return found

    def insert(self, ids: list[int], namespace: Namespace = ANY) -> None:
        self._now += 1
        pages = np.arange(len(ids) // self.index.page_size, dtype=np.int32)
        self.index.insert(token_bytes(ids), pages, self._now, namespace)
        self.publisher.notify()

    def to_host(self, ids: list[int]) -> None:
        self._now += 1
        end = self.index.match(token_bytes(ids), self._now).end
        assert end is not None
        pages = np.arange(len(ids) // self.index.page_size, dtype=np.int32)
        write = self.index.begin_write(end, Tier.DEVICE, Tier.HOST, count=len(pages), pages=pages)
        self.index.ack(write.number)
        self.publisher.notify()

    def evict(self, pages: int) -> None:
        self.index.evict(Tier.DEVICE, pages)
        self.publisher.notify()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def cache(stack: AsyncExitStack, **keywords: Any) -> Cache:
    made = Cache(**keywords)
    stack.push_async_callback(made.publisher.close)
    return made


def follow(stack: AsyncExitStack, source: Source) -> BlockFeed:
    made = BlockFeed("http://worker", source)
    stack.push_async_callback(made.close)
    return made


async def until(condition: Callable[[], object]) -> None:
    await soon(condition, WITHIN_S)


async def until_matched(feed: BlockFeed, ids: list[int], blocks: int) -> None:
    await until(lambda: feed.blocks.matched(hashes_of(ids)) == blocks)


def hashes_of(ids: list[int], size: int = PAGE) -> list[int]:
    return [block_hash(digest) for digest in digest_chain(ids, size)]


PROMPT = [i % 50 for i in range(4 * PAGE + 3)]


@pytest.mark.parametrize(
    "form",
    [{}, {"positional": True}, *({"media": media_of(dialect)} for dialect in get_args(Dialect))],
    ids=["maps", "positional", *get_args(Dialect)],
)
async def test_what_was_cached_before_and_what_comes(
    stack: AsyncExitStack, form: dict[str, Any]
) -> None:
    worker = cache(stack, **form)
    worker.insert(PROMPT[: 2 * PAGE])
    feed = follow(stack, worker.source)
    await until(lambda: feed.live)
    assert feed.blocks.matched(hashes_of(PROMPT)) == 2
    worker.insert(PROMPT)
    await until_matched(feed, PROMPT, 4)
    worker.to_host(PROMPT)
    worker.evict(4)
    worker.insert([7] * PAGE)
    await until_matched(feed, [7] * PAGE, 1)
    assert feed.blocks.matched(hashes_of(PROMPT)) == 4, "host memory has them"
    worker.evict(1)
    await until_matched(feed, [7] * PAGE, 0)
    worker.index.flush()
    worker.publisher.notify()
    await until(lambda: len(feed.blocks) == 0)
    # ZMQ may begin a subscription after the snapshot, and the feed then asks for one batch again.
    assert feed.live and feed.gaps <= 1


async def test_without_a_replay_socket_it_learns_as_it_goes(stack: AsyncExitStack) -> None:
    worker = cache(stack, replay_address=None)
    worker.insert(PROMPT)
    await asyncio.sleep(0)
    feed = follow(stack, worker.source)
    await until(lambda: feed.live)
    assert len(feed.blocks) in (0, 4), "4 where the first batch came in time"
    worker.insert([9] * PAGE)
    await until_matched(feed, [9] * PAGE, 1)


async def test_what_was_missed_is_asked_for(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cache(stack, limits=StreamLimits(kept_batches=2))
    feed = follow(stack, worker.source)
    await until(lambda: feed.live)
    sent = worker.publisher._send
    monkeypatch.setattr(worker.publisher, "_send", lambda batch: batch.seq % 3 and sent(batch))
    prompts = [[n] * PAGE for n in range(1, 40)]
    for prompt in prompts:
        worker.insert(prompt)
        await asyncio.sleep(0.001)
    worker.evict(20)

    def known() -> set[int]:
        return {n for n, prompt in enumerate(prompts) if feed.blocks.matched(hashes_of(prompt))}

    # The least recently used went first. There are 19 on the way there as well.
    await until(lambda: len(feed.blocks) == 19 and known() == set(range(20, 39)))
    monkeypatch.undo()
    assert feed.gaps > 0 and feed.live


async def test_another_life_of_a_publisher(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers begin anew. If they come as far as the old ones, the incarnation tells."""
    monkeypatch.setattr(feed_module, "PAUSE_S", 0.01)
    first = Cache(first_seq=1_000_000)
    first.insert(PROMPT)
    feed = follow(stack, first.source)
    await until(lambda: feed.blocks.matched(hashes_of(PROMPT)) == 4 and feed._last_live > 0)
    address, replay_address = first.publisher.address, first.publisher.replay_address
    await first.publisher.close()
    second = await again(stack, address=address, replay_address=replay_address)
    second.insert([3] * PAGE)
    await until_matched(feed, [3] * PAGE, 1)
    await until_matched(feed, PROMPT, 0)


async def again(stack: AsyncExitStack, **addresses: Any) -> Cache:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                return cache(stack, **addresses)
            except MisuseError:  # the port is not free yet
                await asyncio.sleep(0.01)


NO_TEXT = b"\x93\xca\0\0\0\0\x91\x81\xa4type\xa2\xff\xfe\xc0"
TOO_DEEP = (
    b"\x93\xca\0\0\0\0\x91\x82\xa4type\xb1AllBlocksCleared\xa1x" + b"\x91" * 100_000 + b"\x90\xc0"
)


@pytest.mark.parametrize(
    "frames",
    [
        [b"one"],
        [b"", b"short", b""],
        *([b"", bytes(8), batch] for batch in (b"\xc1", b"\x90", NO_TEXT, TOO_DEEP)),
    ],
)
async def test_what_is_no_stream_is_not_followed(
    stack: AsyncExitStack,
    frames: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "PAUSE_S", 0.001)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    stack.callback(socket.close, 0)
    socket.bind("tcp://127.0.0.1:*")
    feed = follow(stack, Source(socket.getsockopt_string(zmq.LAST_ENDPOINT), None, PAGE))

    def told() -> int:
        socket.send_multipart(frames)
        return sum("are not followed" in text for text in caplog.messages)

    await until(told)
    for _ in range(10):
        assert told() == 1, "said once"
        await asyncio.sleep(0.005)
    assert (feed.live, told()) == (False, 1)


async def test_silence_ends_what_is_known(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cache(stack, heartbeat_s=3600)
    worker.insert(PROMPT)
    feed = follow(stack, worker.source)
    await until(lambda: feed.live)
    monkeypatch.setattr(feed_module, "SILENCE_S", 0.01)
    monkeypatch.setattr(feed_module, "PAUSE_S", 3600)
    worker.insert([9] * PAGE)
    await until(lambda: not feed.live)
    assert len(feed.blocks) == 0


def test_blocks_on_several_media() -> None:
    known = KnownBlocks()
    known.apply(StoredBlocks([1, 2, 3], PAGE, "GPU"))
    known.apply(StoredBlocks([1, 2], PAGE, "CPU"))
    known.apply(RemovedBlocks([1, 2, 3], "GPU"))
    assert [known.matched([1, 2, 3]), known.matched([3])] == [2, 0]
    known.apply(RemovedBlocks([1, 7], "STORAGE"))
    assert known.matched([1]) == 1
    known.expect([5, 6])
    known.expect([5])
    known.apply(AllBlocksCleared())
    assert [known.matched([5, 6]), known.matched([1])] == [2, 0]
    known.settle([5, 6])
    assert [known.matched([5, 6])] == [1]
    known.settle([5])
    assert known.matched([5]) == 0


@pytest.mark.parametrize(
    ("host", "storage"), [("CPU", "STORAGE"), ("CPU_PINNED", "DISK"), ("TAPE", "EXTERNAL")]
)
def test_the_media_of_both_dialects_are_tiers(host: str, storage: str) -> None:
    known = KnownBlocks()
    for medium in ("GPU", host, storage):
        known.apply(StoredBlocks([1], PAGE, medium))
    for medium in (storage, "GPU", host):
        assert known.matched([1]) == 1
        known.apply(RemovedBlocks([1], medium))
    assert known.matched([1]) == 0


def test_media_that_are_one_tier_in_both_dialects_are_one_here() -> None:
    known = KnownBlocks()
    for stored, removed in (("CPU", "CPU_PINNED"), ("DISK", "STORAGE")):
        known.apply(StoredBlocks([1], PAGE, stored))
        known.apply(RemovedBlocks([1], removed))
        assert known.matched([1]) == 0


async def test_events_that_need_a_key(
    stack: AsyncExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "REPLAY_S", 0.2)
    write_key(str(tmp_path / "key"))
    write_key(str(tmp_path / "other"))
    key, other = (read_key(str(tmp_path / name)) for name in ("key", "other"))
    worker = cache(stack, key=key)
    worker.insert(PROMPT)

    def followed_with(key: ControlKey | None) -> BlockFeed:
        source = source_of("http://127.0.0.1:1", worker.publisher.describe(), PAGE, key)
        assert source is not None
        return follow(stack, source)

    feed = followed_with(key)
    await until(lambda: feed.live)
    assert feed.blocks.matched(hashes_of(PROMPT)) == 4

    async def is_told(reason: str) -> None:
        await until(lambda: any(text.endswith(reason) for text in caplog.messages))

    silence = "nothing has come for too long, as where it has another key (--kv-events-key-file)"
    for given, reason in (
        (None, "it sends them to holders of a key (--kv-events-key-file) alone"),
        (other, silence),
    ):
        stranger = followed_with(given)
        await is_told(reason)
        assert not stranger.live and len(stranger.blocks) == 0


async def test_a_key_is_shown_to_no_worker_that_needs_none(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    write_key(str(tmp_path / "key"))
    worker = cache(stack)
    found = source_of(
        "http://127.0.0.1:1", worker.publisher.describe(), PAGE, read_key(str(tmp_path / "key"))
    )
    assert found == worker.source and found.key is None


def test_a_full_router_learns_only_further_media_of_the_blocks_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks_module, "MAX_BLOCKS", 2)
    known = KnownBlocks()
    known.apply(StoredBlocks([1, 2, 7], PAGE, "GPU"))
    known.apply(StoredBlocks([2, 3], PAGE, "CPU"))
    assert len(known) == 2
    known.apply(RemovedBlocks([1, 2], "GPU"))
    assert known.matched([2]) == 1, "it is in host memory still"
    assert known.matched([1]) == known.matched([3]) == 0


def test_events_of_neither_form_are_refused() -> None:
    for payload in (b"", b"\x93", msgspec.msgpack.encode([1.0, [{"type": "Other"}], 0])):
        with pytest.raises(msgspec.DecodeError):
            read_batch(payload)


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://0.0.0.0:5557", "tcp://worker:5557"),
        ("tcp://[::]:5557", "tcp://worker:5557"),
        ("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"),
        ("ipc:///tmp/a", None),
        ("tcp://a:b", None),
        (5, None),
        (None, None),
    ],
)
def test_where_a_worker_publishes(endpoint: object, expected: str | None) -> None:
    found = source_of("http://worker:30000", {"endpoint": endpoint, "replay_endpoint": None}, PAGE)
    assert (found and found.endpoint) == expected
    assert source_of("http://worker:30000", None, PAGE) is None
    assert source_of("http://worker:30000", {"endpoint": "tcp://a:1"}, None) is None


async def blocks_of(
    body: dict[str, Any], encoder: ThreadedTokenizer | None = None
) -> dict[int, list[list[int]]]:
    rest, long_values = await take_apart(msgspec.json.encode(body))
    return await block_hashes(long_values.put_back(decoded(rest, PromptFields)), [4, PAGE], encoder)


@pytest.mark.parametrize("length", [0, 3, 4, 70, 30_000])
async def test_blocks_are_those_of_the_index(length: int, seed: int) -> None:
    dice = random.Random(seed)
    ids = [dice.randrange(1 << 31) for _ in range(length)]
    for fields, namespace in (
        ({}, ANY),
        ({"cache_salt": "a"}, Namespace("a")),
        ({"extra_key": "b"}, Namespace("\0b")),
        ({"cache_salt": ["a"], "extra_key": "b"}, Namespace("a\0b")),
    ):
        found = await blocks_of({"input_ids": ids, **fields})
        for size in (4, PAGE):
            index = PrefixIndex(size, events=True)
            index.insert(
                token_bytes(ids), np.arange(length // size, dtype=np.int32), 0.0, namespace
            )
            events = [
                digest for event in index.take_events() for digest in getattr(event, "digests", ())
            ]
            assert found[size] == [[int(digest[0]) for digest in events]]


@pytest.mark.parametrize("size", [1, 16, 1024])
async def test_no_turn_of_the_loop_hashes_more_than_a_piece(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[int, int]] = []
    real = page_hashes

    def counted(tokens: bytes, page_size: int, previous: bytes) -> list[bytes]:
        turns.append((len(tokens), len(tokens) // page_size // TOKEN_BYTES))
        return real(tokens, page_size, previous)

    monkeypatch.setattr(tokens_module, "page_hashes", counted)
    ids = list(range(1 << 15))
    found = await block_hashes(PromptFields(input_ids=ids), [size], None)
    assert found[size] == [hashes_of(ids, size)]
    assert max(size for size, _ in turns) <= 1 << 16
    assert max(blocks for _, blocks in turns) <= 1 << 10


async def test_several_prompts_have_blocks_of_their_own() -> None:
    found = await blocks_of({"prompt": [[1] * 8, [2] * 4], "cache_salt": ["x", ""]})
    assert [len(one) for one in found[4]] == [2, 1] and found[4][1] == hashes_of([2] * 4, 4)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "no tokenizer"},
        {"messages": [{"role": "user", "content": "none"}]},
        {"input_ids": [-1, 2]},
        {"input_ids": [1 << 40]},
        {"input_ids": ["a"]},
        {"input_ids": [1] * 8, "cache_salt": 5},
        {"input_ids": [[1] * 8, "text"]},
        {"input_ids": {"a": 1}},
        {"input_ids": 5},
    ],
)
async def test_what_has_no_blocks(body: dict[str, Any]) -> None:
    assert await blocks_of(body) == {}


class Words:
    """As much of a tokenizer of transformers as encoding needs: a character is a token."""

    chat_template = "all that was said"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(one) for one in text]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool = True, **keywords: Any
    ) -> dict[str, list[int]]:
        assert tokenize
        return {
            "input_ids": self.encode(
                "".join(one["content"] for one in messages), add_special_tokens=True
            )
        }


async def test_texts_by_the_tokenizer() -> None:
    encoder = ThreadedTokenizer(Words())
    try:
        expected = hashes_of([1, *map(ord, "to be or not to be")], 4)
        for body in (
            {"text": "to be or not to be"},
            {"prompt": "to be or not to be"},
            {
                "messages": [
                    {"role": "user", "content": "to be or not"},
                    {"role": "user", "content": " to be"},
                ]
            },
        ):
            assert (await blocks_of(body, encoder))[4] == [expected]
        bare = await blocks_of({"prompt": ["to be"], "add_special_tokens": False}, encoder)
        assert bare[4] == [hashes_of([*map(ord, "to be")], 4)]
        for refused in (
            {"text": "x" * (MAX_CHARACTERS + 1)},
            {"messages": [{"role": 1}]},
            {"messages": [1]},
            {"messages": "none"},
            {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"tokenize": True},
            },
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5},
        ):
            assert await blocks_of(refused, encoder) == {}
    finally:
        encoder.close()


async def test_a_new_router_finds_what_workers_have(
    meeting: Meeting, stack: AsyncExitStack
) -> None:
    caches = [cache(stack) for _ in range(4)]
    bare = {"cache": NO_CACHE, "pages_total": 4096}
    roles = []
    for name, worker in zip(("prefill", "prefill", "decode", "decode"), caches, strict=True):
        roles.append(await stack.enter_async_context(Role(FakeService(name, meeting))))
        published = {"kv_events": worker.publisher.describe()}
        roles[-1].service.changed_report = {**bare, **published}
    prompt = PROMPT[: 3 * PAGE]
    caches[1].insert(prompt)
    caches[3].insert(prompt[: 2 * PAGE])
    policy = Policy("cache_aware")
    front = await stack.enter_async_context(
        Front(roles[:2], roles[2:], retry_timeout_s=0, policy=policy)
    )
    workers = front.router.workers
    await until(lambda: all(worker.cache.block_size == PAGE for worker in workers.all))

    async def ask(ids: list[int]) -> list[int]:
        before = [len(role.service.requests) for role in roles]
        await front.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}})
        return [len(role.service.requests) - n for role, n in zip(roles, before, strict=True)]

    for _ in range(3):  # though the others are less loaded
        assert await ask([*prompt, 5, 6]) == [0, 1, 0, 1]
    caches[1].evict(3)
    caches[0].insert(prompt)
    first, second = workers.of("prefill")
    assert first.cache.feed is not None and second.cache.feed is not None
    blocks = first.cache.feed.blocks, second.cache.feed.blocks
    await until(lambda: (len(blocks[0]), len(blocks[1])) == (3, 0))
    assert await ask([*prompt, 5, 6]) == [1, 0, 0, 1], "what was evicted is not there"
    assert not any(one._expected for one in blocks)

    text = await front.metrics()
    followed = labelled(text, "kvflow_router_worker_events_followed")
    assert list(followed.values()) == [1] * 4
    cached = labelled(text, "kvflow_router_worker_cached_blocks")
    assert list(cached.values()) == [3, 0, 0, 2]
    before = first.cache.feed
    roles[0].service.incarnation += 1
    first.check_due.set()
    await until(
        lambda: (
            first.cache.feed is not None
            and first.cache.feed is not before
            and first.cache.feed.live
        )
    )
    roles[0].service.changed_report = bare  # it publishes no more
    first.check_due.set()
    await until(lambda: first.cache.feed is None)


async def test_a_feed_goes_on_whatever_ends_a_try(
    monkeypatch: pytest.MonkeyPatch, stack: AsyncExitStack
) -> None:
    """Else what it knows would be taken for what the worker has, for good."""
    monkeypatch.setattr(feed_module, "PAUSE_S", 0.0)
    tries: list[BlockFeed] = []

    async def fails(feed: BlockFeed) -> None:
        tries.append(feed)
        feed.live = True
        if len(tries) > 2:
            await asyncio.Event().wait()
        raise KeyError("block_hashes")

    monkeypatch.setattr(BlockFeed, "_follow", fails)
    feed = follow(stack, Source("tcp://127.0.0.1:1", None, PAGE))
    await until(lambda: len(tries) == 3)
    assert not feed._task.done()
