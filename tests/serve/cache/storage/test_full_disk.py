"""A disk that is really full: nothing wrong is read, and writing goes on once there is room."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.cache.storage.files import FILE_BYTES, read, store, unfinished_in, wrote
from tests.serve.engine.pair import until

COUNT = 20

LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from tests.serve.cache.storage.files import VALUE_BYTES, read, store, unfinished_in, wrote
from tests.serve.engine.pair import until

async def main():
    async with store(Path(sys.argv[1])) as pages:
        assert await wrote(pages, 0) == [True]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (VALUE_BYTES // 2, before[1]))
        while pages.writable:
            assert await wrote(pages, 1, 2) == [False, False]
        assert await read(pages, 0, 1) == [True, False]
        assert not unfinished_in(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        await until(lambda: pages.writable)
        assert await wrote(pages, 1, 2) == [True, True]
        print("errors", pages.counts.errors)

asyncio.run(main())
"""


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """The limit of the process: a write takes a part of a page, and the next one fails."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "errors 3\n"
    assert "File too large" in done.stderr  # what the log said


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for some 10 pages."""
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    size = f"size={10 * FILE_BYTES},mode=700"
    command = [str(mount), "-t", "tmpfs", "-o", size, "kvflow-test", str(tmp_path)]
    if (
        not mount
        or not unmount
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield tmp_path
    finally:
        subprocess.run([unmount, "-l", str(tmp_path)], check=True)


async def test_a_file_system_without_room(small_disk: Path) -> None:
    async with store(small_disk / "pages") as pages:
        stored = [n for n in range(COUNT) if await wrote(pages, n) == [True]]
        assert 5 <= len(stored) < COUNT
        assert pages.counts.trips >= 1
        assert await read(pages, *range(COUNT)) == [n in stored for n in range(COUNT)]
        assert not unfinished_in(small_disk / "pages")
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        await until(lambda: pages.writable)
        assert all(await wrote(pages, *(n for n in range(COUNT) if n not in stored)))
        assert await read(pages, *range(COUNT)) == [True] * COUNT
