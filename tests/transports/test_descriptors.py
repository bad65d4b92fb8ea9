"""Room in the kernel's table of descriptors."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

TABLE = """
import os, resource
from kvflow.transports.host.descriptors import prepare_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ($most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before = set(os.listdir("/proc/self/fd"))
prepare_descriptors(4096)
assert set(os.listdir("/proc/self/fd")) == before
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) for line in file if line.startswith("FDSize")))
"""


@pytest.mark.parametrize(("limit", "most"), [(256, 128), (12_000, 4096)])
def test_the_table_is_made_for_half_of_the_limit(limit: int, most: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < limit:
        pytest.skip("the limit of this process is lower")
    script = TABLE.replace("$most", str(limit))
    run = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert most <= int(run.stdout) < 4 * most
