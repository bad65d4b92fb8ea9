"""A directory of pages: found again, bounded, one process's, and never wrong."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.file import FileBackend
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES
from tests.serve.cache.storage.files import (
    FILE_BYTES,
    IDENTITY,
    VALUE_BYTES,
    FaultyDisk,
    backend,
    get,
    key,
    keys,
    opened,
    pages_in,
    put,
    unfinished_in,
    value,
)

DONE, ABSENT, FAILED, DAMAGED = Result.DONE, Result.ABSENT, Result.FAILED, Result.DAMAGED


def test_what_was_put_is_read_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert put(first, 1, 2) == [DONE, DONE]
    first.close()
    again = opened(tmp_path)
    assert again.exists(keys(1, 3, 2)) == [DONE, ABSENT, DONE]
    assert get(again, 2, 3, 1) == [DONE, ABSENT, DONE]
    assert again.used_bytes == 2 * FILE_BYTES
    again.close()


def test_a_page_is_written_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert put(store, 1, 1) == [DONE, DONE]
    before = pages_in(tmp_path)
    assert put(store, 1) == [DONE]
    assert pages_in(tmp_path) == before
    assert len(before) == 1
    store.close()


def test_the_page_that_was_not_used_for_longest_goes_also_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path, 3)
    for number in (1, 2, 3):
        put(store, number)
    assert get(store, 1) == [DONE]
    put(store, 4)
    assert store.exists(keys(1, 2, 3, 4)) == [DONE, ABSENT, DONE, DONE]
    # A clock tick of the file system apart.
    for number, file in zip((3, 1, 4), (3, 1, 4), strict=True):
        path = next(p for p in pages_in(tmp_path) if p.name.startswith(key(file).hex()))
        os.utime(path, ns=(0, 10**18 + {3: 0, 1: 1, 4: 2}[number]))
    store.close()
    again = opened(tmp_path, 3)
    put(again, 5)
    assert again.exists(keys(3, 1, 4, 5)) == [ABSENT, DONE, DONE, DONE]
    assert len(pages_in(tmp_path)) == 3
    again.close()
    smaller = opened(tmp_path, 1)
    assert smaller.exists(keys(1, 4, 5)) == [ABSENT, ABSENT, DONE]
    assert len(pages_in(tmp_path)) == 1
    smaller.close()


def test_what_was_read_counts_as_used_after_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1, 2)
    for path in pages_in(tmp_path):
        os.utime(path, ns=(0, 10**9 * (1 + path.name.startswith(key(2).hex()))))
    assert get(store, 1) == [DONE]
    store.close()
    again = opened(tmp_path, 1)
    assert again.exists(keys(1, 2)) == [DONE, ABSENT]
    again.close()


def test_threads_that_write_evict_and_read_keep_to_the_capacity(tmp_path: Path, seed: int) -> None:
    store, most = opened(tmp_path, 8), 0

    def work(number: int) -> None:
        nonlocal most
        chosen = random.Random(seed + number)
        for _ in range(150):
            page = chosen.randrange(16)
            if chosen.random() < 0.5:
                assert put(store, page) == [DONE]
            else:
                get(store, page)
            most = max(most, store.used_bytes)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert most <= 8 * FILE_BYTES
    files = pages_in(tmp_path)
    assert store.used_bytes == len(files) * FILE_BYTES
    assert 4 < len(files) <= 8  # two threads that put the same page have made room for two
    assert len({path.name.partition(".")[0] for path in files}) == len(files)
    assert not unfinished_in(tmp_path)
    store.close()


@pytest.mark.parametrize("numbers", [[1], [1, 2], [1, 1]], ids=str)
def test_threads_that_write_at_once_leave_a_file_for_each_page_and_take_all_room(
    tmp_path: Path, numbers: list[int]
) -> None:
    """No page is written where all room is being written."""
    disk, pages = FaultyDisk(), set(numbers)
    go = disk.hold("rename")
    store = opened(tmp_path, len(numbers), disk=disk)
    with ThreadPoolExecutor(2) as threads:
        puts = [threads.submit(put, store, number) for number in numbers]
        for _ in puts:
            assert disk.begun.acquire(timeout=20)
        assert put(store, 9) == [ABSENT]
        go.set()
        assert [one.result() for one in puts] == [[DONE]] * len(numbers)
    assert len(pages_in(tmp_path)) == len(pages)
    assert store.used_bytes == len(pages) * FILE_BYTES
    store.close()


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _flip_last(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _other_page(path: Path) -> None:
    other = next(p for p in path.parents[1].glob("??/*") if p != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [_cut, _grow, _flip_last, _zero, _other_page])
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_page_is_removed_and_heals(tmp_path: Path, damage: object, restart: bool) -> None:
    store = opened(tmp_path)
    put(store, 1, 2)
    path = next(p for p in pages_in(tmp_path) if p.name.startswith(key(1).hex()))
    damage(path)  # type: ignore[operator]
    if restart:
        store.close()
        store = opened(tmp_path)
    found_at_start = restart and damage in (_cut, _grow)  # of another size
    assert get(store, 1, 2) == [ABSENT if found_at_start else DAMAGED, DONE]
    assert not path.exists()
    assert store.used_bytes == FILE_BYTES
    assert store.exists(keys(1)) == [ABSENT]
    assert put(store, 1) == [DONE]
    assert get(store, 1) == [DONE]
    store.close()


def test_a_page_that_was_removed_by_hand_is_not_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    pages_in(tmp_path)[0].unlink()
    assert get(store, 1) == [ABSENT]
    assert store.used_bytes == 0
    store.close()


def test_pages_of_another_identity_are_never_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    other = bytes(32)
    first, second = opened(tmp_path), opened(tmp_path, identity=other)
    assert [record.getMessage() for record in caplog.records] == [
        f"storage directory {tmp_path} also holds pages of 1 other models or layouts"
    ]
    put(first, 1)
    assert second.exists(keys(1)) == [ABSENT]
    mine = pages_in(tmp_path)[0]
    second.close()
    copied = tmp_path / other.hex()[:32] / mine.parent.name / mine.name  # by hand
    copied.write_bytes(mine.read_bytes())
    second = opened(tmp_path, identity=other)
    assert get(second, 1) == [DAMAGED]
    first.close()
    second.close()


def test_leftovers_go_at_the_start_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 1)
    store.close()
    folder = next(tmp_path.iterdir())
    (folder / "writing" / "17").write_bytes(b"half a page")
    names = ("writing/notes", "00/readme.txt", f"00/{key(1).hex()}.1")
    foreign = [folder / name for name in names]
    for path in foreign:
        path.write_bytes(b"not ours")
    newer = next(path for path in pages_in(tmp_path) if path.parent.name != "00")
    older = newer.with_name(f"{key(1).hex()}.9")
    older.write_bytes(newer.read_bytes())
    os.utime(older, ns=(0, 0))
    again = opened(tmp_path)
    assert not (folder / "writing" / "17").exists()
    assert not older.exists()
    assert newer.exists()
    assert all(path.exists() for path in foreign)
    assert again.used_bytes == FILE_BYTES
    put(again, 2)
    assert sum(p.name.endswith(".10") for p in pages_in(tmp_path)) == 1  # no number is used twice
    again.close()


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.serve.cache.storage.files import opened;"
        "store = opened(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        text = rf"is in use by process {other.pid}: give each process a directory of its own"
        with pytest.raises(MisuseError, match=text):
            opened(tmp_path)
        opened(tmp_path, identity=bytes(32)).close()
        other.kill()
    store = opened(tmp_path)
    with pytest.raises(MisuseError, match=f"in use by process {os.getpid()}"):
        opened(tmp_path)
    store.close()


def test_a_start_on_a_full_disk_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    descriptors = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(MisuseError, match="No space left"):
            opened(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    opened(tmp_path).close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MisuseError, match=f"storage directory {tmp_path}/file/.*: Not a directory"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "rename"])
def test_a_write_that_fails_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, call: str, number: int
) -> None:
    disk = FaultyDisk()
    store = opened(tmp_path, disk=disk)
    put(store, 0)
    disk.fails[call] = number
    assert put(store, 1, 2) == [FAILED, FAILED]
    if call == "write":
        with pytest.raises(OSError, match=errno.errorcode[number]):
            store.probe_writes()
    assert disk.counted[call] == (2 if call == "rename" else 3)  # the second page was not tried
    assert store.exists(keys(0, 1, 2)) == [DONE, ABSENT, ABSENT]
    assert not unfinished_in(tmp_path)
    assert get(store, 0) == [DONE]
    disk.fails.clear()
    store.probe_writes()
    assert put(store, 1, 2) == [DONE, DONE]
    assert store.used_bytes == 3 * FILE_BYTES
    store.close()


def test_a_read_that_fails_is_no_damage(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = opened(tmp_path, disk=disk)
    put(store, 1)
    disk.fails["read"] = errno.EIO
    assert get(store, 1) == [FAILED]
    with pytest.raises(OSError, match="EIO"):
        store.probe_reads()
    disk.fails.clear()
    store.probe_reads()
    assert get(store, 1) == [DONE]
    store.close()


def test_what_cannot_be_removed_goes_on_to_count_and_goes_first(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = opened(tmp_path, 2, disk=disk)
    put(store, 1, 2)
    disk.fails["remove"] = errno.EIO
    assert put(store, 3) == [FAILED]
    assert store.exists(keys(1, 2, 3)) == [ABSENT, DONE, ABSENT]
    assert store.used_bytes == 2 * FILE_BYTES
    disk.fails.clear()
    assert put(store, 3) == [DONE]
    assert store.exists(keys(2, 3)) == [DONE, DONE]
    assert len(pages_in(tmp_path)) == 2
    store.close()


def test_with_sync_files_and_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = FileBackend(str(tmp_path), IDENTITY, VALUE_BYTES, FILE_BYTES, sync=True)
    store.open()
    assert put(store, 1) == [DONE]
    assert [Path(path).parent.name for path in synced] == ["writing", IDENTITY.hex()[:32]]
    store.close()
    del synced[:]
    other = backend(tmp_path)
    other.open()
    put(other, 2)
    assert synced == []
    other.close()


@pytest.mark.parametrize(
    ("size", "capacity", "takes"),
    [(0, 4096, 4096), (1, 4095, 4096), (VALUE_BYTES, 100, FILE_BYTES)],
)
def test_a_capacity_that_holds_no_page_is_named(
    tmp_path: Path, size: int, capacity: int, takes: int
) -> None:
    FileBackend(str(tmp_path), IDENTITY, 1, 4096)
    text = f"capacity_bytes {capacity} does not hold one page, which takes {takes} bytes"
    with pytest.raises(MisuseError, match=text):
        FileBackend(str(tmp_path), IDENTITY, size, capacity)


def test_a_probe_leaves_no_file_or_fails(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = opened(tmp_path, disk=disk)
    store.probe_writes()
    assert store.used_bytes == 0 and not unfinished_in(tmp_path)
    disk.fails["remove"] = errno.EIO
    with pytest.raises(OSError, match="a file cannot be removed"):
        store.probe_writes()
    assert store.used_bytes == FILE_BYTES, "it goes on to count"
    store.close()


@pytest.mark.parametrize("most", [7, HEADER_BYTES, HEADER_BYTES + 5, 5000, 1 << 20])
def test_a_disk_may_read_and_write_less_than_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """As the kernel may, of any file: which has a header and the page, and no more."""

    def limited(call: Callable[..., int]) -> Callable[..., int]:
        def one(descriptor: int, buffers: Sequence[bytes | memoryview], *rest: int) -> int:
            left, parts = most, []
            for buffer in buffers:
                parts.append(memoryview(buffer)[:left])
                left -= parts[-1].nbytes
            return call(descriptor, [part for part in parts if part.nbytes], *rest)

        return one

    store = opened(tmp_path)
    monkeypatch.setattr(os, "writev", limited(os.writev))
    assert put(store, 1) == [DONE]
    assert pages_in(tmp_path)[0].read_bytes()[HEADER_BYTES:] == value(1)
    monkeypatch.setattr(os, "preadv", limited(os.preadv))
    assert get(store, 1) == [DONE]
    store.close()
