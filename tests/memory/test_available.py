"""What memory is left: of the machine, and within control groups of both versions."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvflow.memory import available
from kvflow.memory.available import Available, available_memory, one_at_a_time
from kvflow.memory.shared import SharedSegment
from kvflow.protocols.errors import LayoutError

MIB = 1 << 20


def machine(root: Path, *groups: str, free: int = 1000 * MIB) -> tuple[Path, Path]:
    """A /proc with these lines of /proc/self/cgroup, and an empty place for control groups."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    cgroups.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal: 1 kB\nMemFree: 2 kB\nMemAvailable:   {free >> 10} kB\n"
    )
    (proc / "self" / "cgroup").write_text("\n".join(groups) + "\n")
    return proc, cgroups


def group(folder: Path, limit: str, used: int, cached: int = 0, *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    name = "total_inactive_file" if v1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{name} {cached}\n{name}_x 77\n")


def test_the_machine_alone(tmp_path: Path) -> None:
    assert available_memory(*machine(tmp_path, "0::/")) == Available(
        1000 * MIB, "memory of the machine"
    )


def test_a_group_of_version_2_and_its_parents(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/a/b")
    group(cgroups / "a/b", "max", 10 * MIB)
    group(cgroups / "a", str(100 * MIB), 40 * MIB, 5 * MIB)
    found = available_memory(proc, cgroups)
    assert found == Available(65 * MIB, f"control group {cgroups / 'a'}, limit {100 * MIB}")


def test_a_group_of_version_1(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "3:cpuset:/", "4:cpu,memory:/a", "0::/")
    group(cgroups / "memory", "9223372036854771712", 50 * MIB, v1=True)
    group(cgroups / "memory/a", str(100 * MIB), 70 * MIB, 1 * MIB, v1=True)
    found = available_memory(proc, cgroups)
    assert found is not None and found.size_bytes == 31 * MIB


def test_in_a_container_the_own_group_is_the_root_of_the_mount(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "4:memory:/docker/0123")
    group(cgroups / "memory", str(64 * MIB), 60 * MIB, v1=True)
    found = available_memory(proc, cgroups)
    assert found is not None and found.size_bytes == 4 * MIB


def test_a_group_above_its_limit_has_nothing_left(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/")
    group(cgroups, str(64 * MIB), 80 * MIB)
    found = available_memory(proc, cgroups)
    assert found is not None and found.size_bytes == 0


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize("make", [SharedSegment.create, SharedSegment.private])
def test_more_than_there_is_is_refused_before_it_is_touched(
    make: Callable[[int], SharedSegment],
) -> None:
    there = available_memory()
    assert there is not None
    with pytest.raises(
        LayoutError, match=r"no memory for a pool of \d+ bytes: \d+ bytes are available \("
    ):
        make(there.size_bytes * 2)


def test_a_group_without_a_figure_says_nothing_and_its_parents_do(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "0::/a/b")
    group(cgroups / "a/b", str(2 * MIB), 1 * MIB)
    (cgroups / "a/b" / "memory.max").unlink()
    group(cgroups / "a", str(100 * MIB), 40 * MIB)
    found = available_memory(proc, cgroups)
    assert found is not None and found.size_bytes == 60 * MIB


def test_only_the_memory_controller_of_version_1_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, "3:cpu:/small", "4:memory:/a")
    group(cgroups / "memory/small", str(2 * MIB), 1 * MIB, v1=True)
    group(cgroups / "memory/a", str(100 * MIB), 70 * MIB, v1=True)
    found = available_memory(proc, cgroups)
    assert found is not None and found.size_bytes == 30 * MIB


def package() -> int:
    return os.open(Path(available.__file__).parents[1], os.O_RDONLY)


def test_a_child_that_was_forked_meanwhile_keeps_nobody_waiting() -> None:
    """A forked child shares the open file, as this copy of its descriptor does."""
    with one_at_a_time():
        (held,) = (
            int(name)
            for name in os.listdir("/proc/self/fd")
            if os.path.realpath(f"/proc/self/fd/{name}") == str(Path(available.__file__).parents[1])
        )
        child, other = os.dup(held), package()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(child)


def test_a_file_system_without_locks_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), one_at_a_time():
        pass
    assert "cannot be locked ([Errno 37] No locks available)" in caplog.text
