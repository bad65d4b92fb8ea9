"""Answers of a Mooncake Store, many of which a real one gives only in trouble."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage import mooncake
from kvflow.serve.cache.storage.mooncake import MooncakeBackend, check_usable
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES
from tests.serve.cache.storage.files import IDENTITY, empty, key, keys, value

SIZE = 300
DONE, ABSENT, DAMAGED, FAILED = Result.DONE, Result.ABSENT, Result.DAMAGED, Result.FAILED
NOBODY = "127.0.0.1:1"


class Client:
    """Answers as mooncake's client does, or with the status that a test has chosen."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.registered: list[tuple[int, int]] = []
        self.put: list[str] = []
        self.removed: list[tuple[str, bool]] = []
        # By the key in hexadecimal digits: answers of puts and gets, which then do nothing.
        self.status: dict[str, int] = {}
        self.status_of_all = 0  # the answer of every other put
        self.late: dict[str, int] = {}  # by key: looks that do not find the page yet
        self.looks = self.refuses = 0

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.append((address, size))
        return self.refuses

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        codes = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            self.put.append(name)
            if (code := self.status.get(name[-64:], self.status_of_all)) == 0:
                self._check(address, size)
                self.records.setdefault(name, ctypes.string_at(address, size))
            codes.append(code)
        return codes

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        codes = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            record = self.records.get(name, b"")
            code = self.status.get(name[-64:], len(record) or mooncake.NOT_FOUND)
            if code == len(record):
                self._check(address, size)
                ctypes.memmove(address, record, min(size, len(record)))
            codes.append(code)
        return codes

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self.looks += 1
        return [self._exists(name) for name in names]

    def remove(self, name: str, force: bool) -> int:
        self.removed.append((name, force))
        self.records.pop(name, None)
        return 0

    def _exists(self, name: str) -> int:
        if (left := self.late.get(name[-64:], 0)) > 0:
            self.late[name[-64:]] = left - 1
            return 0
        return int(name in self.records)

    def _check(self, address: int, size: int) -> None:
        assert any(
            start <= address and address + size <= start + bytes_
            for start, bytes_ in self.registered
        )


@pytest.fixture
def client() -> Client:
    return Client()


def over(client: Client, size: int = SIZE, identity: bytes = IDENTITY) -> MooncakeBackend:
    found = MooncakeBackend(NOBODY, identity, size)
    found._client = client
    return found


def values(*numbers: int) -> list[memoryview]:
    return [value(number, SIZE) for number in numbers]


def test_pages_come_back_whole_in_batches_and_in_their_order(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MooncakeBackend, "pages_at_once", 3)
    store = over(client)
    assert store.put(keys(*range(8)), values(*range(8))) == [DONE] * 8
    assert store.exists(keys(7, 99, 0)) == [DONE, ABSENT, DONE]
    assert store.get(keys(99, *range(7, -1, -1)), into := empty(9, SIZE)) == [ABSENT, *[DONE] * 8]
    assert into[1:] == values(*range(7, -1, -1))
    assert client.registered == [(client.registered[0][0], 3 * (HEADER_BYTES + SIZE))], (
        "one piece serves them all"
    )
    assert {name.rpartition("/")[0] for name in client.records} == {f"kvflow/{IDENTITY.hex()[:32]}"}
    assert {name[-64:] for name in client.records} == {key(n).hex() for n in range(8)}


def test_pages_that_are_larger_than_a_piece_of_memory_pass_one_by_one(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "BATCH_BYTES", SIZE - 1)
    store = over(client)
    assert store.put(keys(1, 2), values(1, 2)) == [DONE] * 2
    assert store.get(keys(1, 2), into := empty(2, SIZE)) == [DONE] * 2
    assert into == values(1, 2)
    assert [size for _, size in client.registered] == [HEADER_BYTES + SIZE]


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (mooncake.NO_ROOM, ABSENT),
        (-1, FAILED),
        (mooncake.NOT_READY, ABSENT),  # another client puts it, and has died over that
    ],
)
def test_a_put_that_did_not_work_is_told_apart_from_a_full_store(
    client: Client, status: int, result: Result
) -> None:
    client.status[key(2).hex()] = status
    store = over(client)
    assert store.put(keys(1, 2, 3), values(1, 2, 3)) == [DONE, result, DONE]


def test_a_page_that_another_client_puts_is_stored_when_that_one_has_written_it(
    client: Client,
) -> None:
    """A put reports success before that."""
    store = over(client)
    client.late[key(1).hex()] = mooncake.MORE_LOOKS
    assert store.put(keys(1, 2), values(1, 2)) == [DONE, DONE]
    client.late[key(3).hex()] = mooncake.MORE_LOOKS + 1
    client.looks = 0
    assert store.put(keys(3, 4), values(3, 4)) == [ABSENT, DONE]
    assert client.looks == mooncake.MORE_LOOKS + 1


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (mooncake.NOT_FOUND, ABSENT),
        (mooncake.NOT_READY, ABSENT),
        (mooncake.OTHER_SIZE, DAMAGED),
        (mooncake.UNREADABLE, DAMAGED),
        (0, DAMAGED),
        (SIZE, DAMAGED),
        (-1, FAILED),
    ],
)
def test_what_can_never_be_read_is_removed_and_what_cannot_be_read_now_is_left(
    client: Client, status: int, result: Result
) -> None:
    store = over(client)
    assert store.put(keys(1, 2, 3), values(1, 2, 3)) == [DONE] * 3
    client.status[key(2).hex()] = status
    assert store.get(keys(1, 2, 3), into := empty(3, SIZE)) == [DONE, result, DONE]
    assert (into[0], into[2]) == (value(1, SIZE), value(3, SIZE))
    # Forced: a lease that a reader has would keep it.
    assert client.removed == ([(store._names(keys(2))[0], True)] if result is DAMAGED else [])


def test_a_record_of_other_bytes_or_of_another_model_is_damaged(client: Client) -> None:
    store, other = over(client), over(client, identity=bytes(32))
    assert store.put(keys(1, 2), values(1, 2)) == [DONE] * 2
    mine, theirs = store._names(keys(1))[0], other._names(keys(1))[0]
    assert mine != theirs
    client.records[theirs] = client.records[mine]
    assert other.get(keys(1), empty(1, SIZE)) == [DAMAGED]
    client.records[mine] = client.records[mine][:-1] + bytes([client.records[mine][-1] ^ 1])
    assert store.get(keys(1, 2), empty(2, SIZE)) == [DAMAGED, DONE]
    assert store.put(keys(1), values(1)) == [DONE], "it heals"
    assert store.get(keys(1), into := empty(1, SIZE)) == [DONE]
    assert into == values(1)


def test_an_answer_to_a_lookup_that_is_neither_is_a_failure(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([[1, 0, -1], [-1], [0], [1]])
    monkeypatch.setattr(client, "batch_is_exist", lambda names: next(answers))
    store = over(client)
    assert store.exists(keys(1, 2, 3)) == [DONE, ABSENT, FAILED]
    with pytest.raises(OSError, match=r"the master does not answer \(status -1\)"):
        store.probe_reads()
    store.probe_reads()
    store.probe_reads()


@pytest.mark.parametrize("status", [0, mooncake.NO_ROOM])
def test_a_probe_writes_a_page_of_its_own_each_time_and_removes_it(
    client: Client, status: int
) -> None:
    store = over(client)
    client.status_of_all = status
    for _ in range(2):
        store.probe_writes()
    assert [name for name, _ in client.removed] == client.put
    assert len(set(client.put)) == 2
    assert all(forced for _, forced in client.removed), "a lease would keep it"
    assert not client.records
    client.status_of_all = -1
    with pytest.raises(OSError, match=r"a page cannot be put \(status -1\)"):
        store.probe_writes()


def test_memory_that_the_engine_refuses_is_a_failure_of_the_call(client: Client) -> None:
    client.refuses = 7
    with pytest.raises(OSError, match=r"refuses \d+ bytes of memory \(status 7\)"):
        over(client).put(keys(1), values(1))


def test_a_store_that_is_not_connected_fails_every_call_at_once() -> None:
    store = MooncakeBackend(NOBODY, IDENTITY, SIZE)
    assert repr(store) == f"<MooncakeBackend of the master {NOBODY}, not connected>"
    for call in (store.put, store.get):
        with pytest.raises(OSError, match=f"not connected to the master {NOBODY}"):
            call(keys(1), empty(1, SIZE))


def test_a_master_that_nobody_is_is_named() -> None:
    with pytest.raises(OSError, match=f"the master {NOBODY} does not answer: "):
        MooncakeBackend(NOBODY, IDENTITY, SIZE).probe_reads()


@pytest.fixture
def master() -> Iterator[str]:
    """An address at which somebody listens, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}"


ASK = "import sys; sys.exit(3 if sys.argv[1:] == {wanted} else 4)"


def backend_at(master: str) -> MooncakeBackend:
    return MooncakeBackend(
        master,
        IDENTITY,
        SIZE,
        host="10.0.0.7",
        lent_bytes=5,
        metadata_server="http://there/metadata",
        local_bytes=6,
    )


def test_a_child_asks_for_all_that_the_client_needs_and_how_it_ended_is_said(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waits for its master holds the GIL, so a child process asks first."""
    wanted = [master, "10.0.0.7", "http://there/metadata", "6"]
    monkeypatch.setattr(mooncake, "_ASK", ASK.format(wanted=wanted))
    text = "metadata server http://there/metadata: a child that tried to ended with status 3$"
    with pytest.raises(
        OSError, match=f"^nobody can be a client of the master {master} with the {text}"
    ):
        backend_at(master).probe_writes()


def test_a_child_that_does_not_end_is_killed(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_ASK", "import time; time.sleep(60)")
    monkeypatch.setattr(mooncake, "ASK_S", 0.05)
    with pytest.raises(OSError, match=r"a child that tried to has not ended within 0\.05 s$"):
        backend_at(master).probe_reads()


@pytest.mark.parametrize("status", [0, 9])
def test_one_client_is_set_up_where_a_child_could_be_one(
    master: str, client: Client, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    given: list[tuple[object, ...]] = []

    def setup(*arguments: object) -> int:
        given.append(arguments)
        return status

    client.setup = setup  # type: ignore[attr-defined]
    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = lambda: client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(mooncake, "_ASK", "")
    store = backend_at(master)
    if status:
        with pytest.raises(OSError, match=rf"the master {master} refuses us \(status 9\)"):
            store.probe_reads()
        return
    store.probe_reads()
    store.probe_writes()
    assert store.put(keys(1), [value(1, SIZE)]) == [DONE]
    assert given == [("10.0.0.7", "http://there/metadata", 5, 6, "tcp", "", master)], (
        "once, whatever it is asked for"
    )
    assert repr(store) == f"<MooncakeBackend of the master {master}>"


def test_what_is_missing_on_this_machine_is_said_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mooncake, "_ENVIRONMENT", {})
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ask in (MooncakeBackend(NOBODY, IDENTITY, SIZE).open, lambda: check_usable(NOBODY)):
        with pytest.raises(
            MisuseError, match=r"mooncake is not installed: pip install 'kvflow\[mooncake\]'"
        ):
            ask()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_usable(NOBODY)


def test_the_engine_is_told_to_use_tcp_and_what_a_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in mooncake._ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(MisuseError):
        MooncakeBackend(NOBODY, IDENTITY, SIZE).open()
    assert (os.environ["MC_FORCE_TCP"], os.environ["MC_LOG_LEVEL"]) == ("1", "INFO")


@pytest.mark.parametrize(
    "address",
    [
        *("", "127.0.0.1", "127.0.0.1:", ":50051", "127.0.0.1:0", "127.0.0.1:65536", "a:b"),
        *(
            "http://127.0.0.1:50051",
            "a:\N{SUPERSCRIPT TWO}",
            "a:\N{ARABIC-INDIC DIGIT ONE}",
            "a:+1",
        ),
    ],
)
def test_an_address_that_is_none_is_named(address: str) -> None:
    for take in (check_usable, lambda master: MooncakeBackend(master, IDENTITY, SIZE)):
        with pytest.raises(MisuseError, match=r"is not host:port with a port in 1\.\.65535"):
            take(address)


def test_addresses_that_are_some() -> None:
    assert mooncake._parsed("master.example:65535") == ("master.example", 65535)
    assert mooncake._parsed("[::1]:1") == ("::1", 1)


@pytest.mark.parametrize(("value_bytes", "lent_bytes"), [(0, 0), (1, -1)])
def test_sizes_that_are_none_are_named(value_bytes: int, lent_bytes: int) -> None:
    MooncakeBackend(NOBODY, IDENTITY, 1, lent_bytes=0)
    text = f"value_bytes {value_bytes} is below 1, or lent_bytes {lent_bytes} below 0"
    with pytest.raises(MisuseError, match=text):
        MooncakeBackend(NOBODY, IDENTITY, value_bytes, lent_bytes=lent_bytes)
