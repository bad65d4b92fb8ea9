"""A process that is killed while it writes, evicts and reads leaves whole pages."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvflow.serve.cache.storage.port import Result
from tests.serve.cache.storage.files import (
    FILE_BYTES,
    VALUE_BYTES,
    empty,
    key,
    keys,
    opened,
    pages_in,
    unfinished_in,
    value,
)

PAGES, NAMES, ROUNDS = 40, 60, 40

WRITER = """
import random, sys, threading
from pathlib import Path
from tests.serve.cache.storage.files import keys, opened, values
from tests.serve.cache.storage.test_kill import NAMES, PAGES

store = opened(Path(sys.argv[1]), PAGES)
print("open", flush=True)

def write(seed):
    chosen = random.Random(seed)
    while True:
        page = chosen.randrange(NAMES)
        store.put(keys(page), values(page))

for n in range(2):
    threading.Thread(target=write, args=(int(sys.argv[2]) + n,)).start()
"""


@pytest.mark.slow
def test_no_torn_page_is_ever_read(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    torn = unfinished = most = 0
    for _ in range(ROUNDS):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(chosen.randrange(1 << 30))]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4])
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        time.sleep(chosen.random() * 0.03)  # until any moment
        writer.send_signal(signal.SIGKILL)
        assert writer.wait(20) == -signal.SIGKILL
        writer.stdout.close()
        unfinished += len(unfinished_in(tmp_path))
        left = {path.name.partition(".")[0] for path in pages_in(tmp_path)}

        store = opened(tmp_path, PAGES)
        assert not unfinished_in(tmp_path)
        names = list(range(NAMES))
        found = store.exists(keys(*names))
        # The index is what was there.
        assert {key(n).hex() for n in names if found[n] is Result.DONE} == left
        results = store.get(keys(*names), into := empty(NAMES))
        torn += results.count(Result.DAMAGED)
        assert all(into[n] == value(n) for n in names if results[n] is Result.DONE)
        assert results == found
        assert store.used_bytes == len(pages_in(tmp_path)) * FILE_BYTES <= PAGES * FILE_BYTES
        most = max(most, len(left))
        store.close()
    print(
        f"{ROUNDS} kills: {unfinished} files were not whole, {torn} torn pages, {most} pages of "
        f"{VALUE_BYTES} bytes"
    )
    assert torn == 0
    assert unfinished > 0  # some kills have met a write
    assert most == PAGES  # and some an eviction
