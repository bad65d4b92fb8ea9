"""`kvflow doctor`: checks of this machine, with advice for each one that fails."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

import kvflow
from kvflow.extras import CORE, EXTRAS
from kvflow.serve.config.sources import unknown_variables
from kvflow.serve.launch.mooncake_master import NAME as MASTER
from kvflow.serve.launch.mooncake_master import find_program
from kvflow.transports.data.ascend import missing_for_ascend

MOONCAKE_WHEELS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
)
_KFD, _RDMA_DEVICES = Path("/dev/kfd"), Path("/sys/class/infiniband")
OLDEST_MOONCAKE = (0, 3, 12)
NIXL_WHEELS = {"nixl-cu12": "nixl_cu12", "nixl-cu13": "nixl_cu13"}  # module by distribution
# Each library's name for the dynamic loader, and its Debian package.
LIBRARIES = (("ibverbs", "libibverbs1"), ("numa", "libnuma1"), ("curl", "libcurl4"))
MIN_OPEN_FILES = 4096
IMPORT_TIMEOUT_S = 60.0


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. If a check is `needed` and not `ok`, the exit status is 1."""

    name: str
    ok: bool
    detail: str
    needed: bool
    advice: str = ""


def findings() -> Iterator[Finding]:
    """Yield the results of all checks. Some of them import a library in a child process."""
    yield _python()
    # This reads the metadata of every installed distribution, which is slow.
    distributions = importlib.metadata.packages_distributions()
    for names, needed, advice in (
        (CORE, True, "pip install kvflow"),
        (EXTRAS["server"], True, "pip install 'kvflow[server]'"),
        (EXTRAS["engine"], False, "pip install 'kvflow[engine]'"),
    ):
        for name in names:
            yield _package(name, distributions, needed=needed, advice=advice)
    yield _device()
    yield _mooncake_wheels()
    for name, package in LIBRARIES:
        yield _library(name, package)
    yield _data_plane("mooncake", mooncake_unavailable_reason(), "can be loaded")
    yield _mooncake_store()
    yield _nixl()
    yield _plane("ascend")
    yield _plane("mori")
    yield _shared_memory()
    yield _pidfd()
    yield _open_files()
    yield _variables()


def mooncake_unavailable_reason(module: str = "mooncake.engine") -> str | None:
    """Return one line that explains why `module` cannot be used, or None if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install 'kvflow[mooncake]'"
    wheels = _mooncake_wheels()
    if not wheels.ok:
        return f"{wheels.detail}: {wheels.advice}"
    missing = [package for name, package in LIBRARIES if not ctypes.util.find_library(name)]
    if not (reason := _import_error(module)):
        return None
    advice = f": apt-get install -y {' '.join(missing)}" if missing else ""
    return f"mooncake cannot be loaded ({reason}){advice}"


def nixl_unavailable_reason() -> str | None:
    module = next(
        (module for module in NIXL_WHEELS.values() if importlib.util.find_spec(module) is not None),
        None,
    )
    if module is None:
        return "nixl is not installed: pip install 'kvflow[nixl]'"
    if why := _import_error(f"{module}._api"):
        return f"nixl cannot be loaded ({why})"
    return None


def ascend_unavailable_reason() -> str | None:
    missing = missing_for_ascend()
    if not missing and (why := _import_error("mooncake.engine")):
        missing.append(f"mooncake cannot be loaded ({why})")
    return "; ".join(missing) or None


def mori_unavailable_reason() -> str | None:
    missing = []
    if importlib.util.find_spec("mori") is None:
        missing.append("mori is not installed (pip install amd_mori)")
    elif why := _import_error("mori.io"):
        missing.append(f"mori cannot be loaded ({why})")
    if not _KFD.exists():
        missing.append(f"ROCm's driver is not loaded ({_KFD} is not there)")
    if not any(_RDMA_DEVICES.glob("*")):
        missing.append(f"there is no RDMA device in {_RDMA_DEVICES}")
    return "; ".join(missing) or None


def plane_unavailable_reason(plane: str) -> str | None:
    """Return one line that explains why a built-in plane is unusable, or None if it seems fine."""
    reasons = {
        "mooncake": mooncake_unavailable_reason,
        "nixl": nixl_unavailable_reason,
        "ascend": ascend_unavailable_reason,
        "mori": mori_unavailable_reason,
    }
    return reasons[plane]() if plane in reasons else None


def _import_error(module: str) -> str:
    """Import `module` in a child, which a broken library may crash. Return the error, or ""."""
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing it takes longer than {IMPORT_TIMEOUT_S:g} s"
    if probe.returncode == 0:
        return ""
    return (probe.stderr.strip().splitlines() or [f"status {probe.returncode}"])[-1]


def _python() -> Finding:
    ok = sys.version_info >= (3, 11) and sys.platform == "linux"
    return Finding(
        "python",
        ok,
        f"{platform.python_version()} on {sys.platform}",
        True,
        "kvflow needs Linux, Python 3.11",
    )


def _package(
    module: str, distributions: Mapping[str, Sequence[str]], *, needed: bool, advice: str
) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(module, False, "not installed", needed, advice)
    names = distributions.get(module, [module])
    return Finding(module, True, importlib.metadata.version(names[0]), needed)


def _device() -> Finding:
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        return Finding("device", False, "no model can run", False, "pip install 'kvflow[engine]'")
    from kvflow.serve.engine.model.device import describe_devices, find_device

    found = find_device("auto")
    unused = found.type == "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
    advice = (
        "install a build of torch for CUDA, and a driver that it knows: this machine has an NVIDIA "
        "device"
    )
    return Finding("device", not unused, f"{found}: {describe_devices()}", False, advice)


def _mooncake_wheels() -> Finding:
    found = _versions(MOONCAKE_WHEELS)
    if not found:
        return Finding(
            "mooncake wheel", False, "not installed", False, "pip install 'kvflow[mooncake]'"
        )
    detail = ", ".join(f"{name} {version}" for name, version in found.items())
    # All these wheels install the same files. The last one overwrites the others, and uninstalling
    # one removes files of the others too.
    if len(found) > 1:
        advice = f"pip uninstall -y {' '.join(found)}, then install one of them"
        return Finding(
            "mooncake wheel", False, f"two wheels of one package: {detail}", True, advice
        )
    version = next(iter(found.values()))
    if _numbers(version) < OLDEST_MOONCAKE:
        advice = (
            "upgrade to 0.3.12.post1 or newer: older versions report a write done before its bytes "
            "have arrived"
        )
        return Finding("mooncake wheel", False, detail, True, advice)
    return Finding("mooncake wheel", True, detail, False)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _library(name: str, package: str) -> Finding:
    found = ctypes.util.find_library(name)
    return Finding(
        f"lib{name}", bool(found), found or "not found", False, f"apt-get install -y {package}"
    )


def _data_plane(name: str, reason: str | None, detail: str, advice: str = "") -> Finding:
    return Finding(
        f"{name} data plane", reason is None, reason or detail, False, advice or reason or ""
    )


def _mooncake_store() -> Finding:
    reason, program = mooncake_unavailable_reason("mooncake.store"), find_program()
    detail = reason or (
        f"can be loaded; {program}" if program else f"can be loaded; no {MASTER} to start"
    )
    advice = (
        "pip install 'kvflow[mooncake]', whose mooncake_master `kvflow up --l3 mooncake` starts"
    )
    return Finding(
        "mooncake store", reason is None and program is not None, detail, False, reason or advice
    )


def _nixl() -> Finding:
    found = [f"{name} {version}" for name, version in _versions(NIXL_WHEELS).items()]
    return _data_plane("nixl", nixl_unavailable_reason(), f"can be loaded ({', '.join(found)})")


def _plane(name: str) -> Finding:
    detail = "nothing is missing; it has never run on its hardware"
    advice = f"{name} is for its vendor's machines"
    return _data_plane(name, plane_unavailable_reason(name), detail, advice)


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _shared_memory() -> Finding:
    try:
        descriptor = os.memfd_create("kvflow-doctor")
        os.ftruncate(descriptor, 1 << 20)
        os.close(descriptor)
    except OSError as error:
        return Finding(
            "shared memory",
            False,
            f"memfd_create: {error.strerror}",
            True,
            "the local data plane needs memfd",
        )
    return Finding("shared memory", True, "memfd works", True)


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "pidfd",
            False,
            f"pidfd_open: {error.strerror}",
            False,
            "a peer's death cannot be observed; needs Linux 5.3",
        )
    return Finding("pidfd", True, "a peer's death can be observed", False)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        "open files",
        # Roles raise their soft limit to the hard one, so only the hard limit counts.
        hard == resource.RLIM_INFINITY or hard >= MIN_OPEN_FILES,
        f"soft {soft}, hard {hard}",
        False,
        f"ulimit -Hn {MIN_OPEN_FILES}, as root",
    )


def _variables() -> Finding:
    unknown = unknown_variables(os.environ)
    return Finding(
        "environment",
        not unknown,
        "; ".join(unknown) or "every KVFLOW_* is known",
        True,
        "unset it",
    )


def run_doctor(*, as_json: bool) -> int:
    """Print the findings. Return the exit status: 0 if all needed checks pass, otherwise 1."""
    found = list(findings())
    bad = [finding for finding in found if finding.needed and not finding.ok]
    if as_json:
        document = {"version": kvflow.__version__, "ok": not bad, "findings": found}
        sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
        return 1 if bad else 0
    console = Console(highlight=False)
    for finding in found:
        if finding.ok:
            mark = "[green]ok  [/]"
        elif finding.needed:
            mark = "[red]bad [/]"
        else:
            mark = "[yellow]none[/]"
        advice = f"  -> {escape(finding.advice)}" if finding.advice and not finding.ok else ""
        console.print(f"{mark} {finding.name:<20} {escape(finding.detail)}{advice}", soft_wrap=True)
    return 1 if bad else 0
