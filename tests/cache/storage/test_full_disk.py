"""A disk that is really full: nothing wrong is read, and writing goes on by itself when there is
room again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache.storage.files import FILE_BYTES, QUICK, empty, keys, store, values
from tests.cache.storage.test_guarded import ended, until

COUNT = 20

LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from tests.cache.storage.files import VALUE_BYTES, empty, key, keys, store, value, values
from tests.cache.storage.test_guarded import ended, until

async def main():
    async with store(Path(sys.argv[1])) as pages:
        assert await ended(pages.put(keys(0), values(0))) == [True]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (VALUE_BYTES // 2, before[1]))
        while pages.writable:
            assert await ended(pages.put(keys(1, 2), values(1, 2))) == [False, False]
        assert await ended(pages.get(keys(0, 1), into := empty(2))) == [True, False]
        assert into[0] == value(0)
        assert not list(Path(sys.argv[1]).glob("*/writing/*"))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await until(lambda: pages.writable)
        assert await ended(pages.put(keys(1, 2), values(1, 2))) == [True, True]
        print("errors", pages.counts.errors)

asyncio.run(main())
"""


def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """The limit of the process: a write takes a part of a page, and the next one fails."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "errors 3\n"
    assert "File too large" in done.stderr  # what the log said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for some 10 pages."""
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    options = [
        "-t",
        "tmpfs",
        "-o",
        f"size={10 * FILE_BYTES},mode=700",
        "kvflow-test",
        str(tmp_path),
    ]
    if (
        not mount
        or not unmount
        or subprocess.run([mount, *options], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield tmp_path
    finally:
        subprocess.run([unmount, "-l", str(tmp_path)], check=True)


async def test_a_file_system_without_room(small_disk: Path) -> None:
    async with store(small_disk / "pages", disk=None, limits=QUICK) as pages:
        stored = [n for n in range(COUNT) if (await ended(pages.put(keys(n), values(n)))) == [True]]
        assert 5 <= len(stored) < COUNT
        assert pages.counts.trips >= 1
        assert await ended(pages.get(keys(*range(COUNT)), into := empty(COUNT))) == [
            n in stored for n in range(COUNT)
        ]
        assert all(into[n] == values(n)[0] for n in stored)
        assert not list(small_disk.glob("pages/*/writing/*"))
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        await until(lambda: pages.writable)
        missing = [n for n in range(COUNT) if n not in stored]
        assert all(await ended(pages.put(keys(*missing), values(*missing))))
        assert await ended(pages.get(keys(*range(COUNT)), into)) == [True] * COUNT
        assert into == values(*range(COUNT))
