"""doctor: what it finds, and the advice for what is missing."""

from __future__ import annotations

import ctypes.util
import functools
import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvflow.serve.engine.model import device
from kvflow.serve.launch import doctor

# Doctor imports four libraries, each in a process, and reads the metadata of all that is installed:
# neither changes between two tests.
import_error = functools.cache(doctor._import_error)
distributions = functools.cache(importlib.metadata.packages_distributions)


@pytest.fixture(autouse=True)
def _looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_import_error", import_error)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", distributions)


def finding(name: str) -> doctor.Finding:
    return next(found for found in doctor.findings() if found.name == name)


def wheels(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in doctor.MOONCAKE_WHEELS:
            return real(name)
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_every_finding_is_told_to_people_and_to_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list(doctor.findings())
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    status = doctor.run_doctor(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is (status == 0)
    names = [one["name"] for one in document["findings"]]
    assert {"python", "aiohttp", "torch", "shared memory", "open files"} <= set(names)
    assert doctor.run_doctor(as_json=False) == status
    out = capsys.readouterr().out
    assert names == [one.name for one in found] and all(name in out for name in names)


def test_the_device_of_models_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_devices", list)
    found = finding("device")
    assert found.detail.startswith("cpu: torch ") and "no CUDA device" in found.detail
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "nvidia0"])
    unused = finding("device")
    assert not unused.ok and not unused.needed and "build of torch for CUDA" in unused.advice
    monkeypatch.setattr(device, "cuda_devices", lambda: ["NVIDIA H100"])
    assert finding("device").ok and finding("device").detail.startswith("cuda:0: torch ")


def test_two_mooncake_wheels_are_an_error_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(
        monkeypatch,
        {"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.13"},
    )
    found = finding("mooncake wheel")
    assert not found.ok and found.needed
    assert (
        "pip uninstall -y mooncake-transfer-engine-non-cuda mooncake-transfer-engine"
        in found.advice
    )


def test_an_old_mooncake_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, {"mooncake-transfer-engine": "0.3.9.post2"})
    assert not finding("mooncake wheel").ok


def test_a_missing_mooncake_is_no_error_but_has_an_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels(monkeypatch, {})
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mooncake" else real(name)
    )
    assert (
        doctor.mooncake_unavailable_reason()
        == "mooncake is not installed: pip install 'kvflow[mooncake]'"
    )
    assert not finding("mooncake wheel").needed
    assert doctor.run_doctor(as_json=True) == 0
    capsys.readouterr()


def test_a_library_that_is_missing_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        ctypes.util, "find_library", lambda name: None if name == "numa" else f"lib{name}.so"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wheels(monkeypatch, {"mooncake-transfer-engine": "0.3.13"})
    failed: Any = subprocess.CompletedProcess(
        [], 1, "", "Traceback\nImportError: libnuma.so.1: cannot open"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(doctor, "_import_error", import_error.__wrapped__)
    reason = doctor.mooncake_unavailable_reason()
    assert reason == (
        "mooncake cannot be loaded (ImportError: libnuma.so.1: cannot open): apt-get install "
        "-y libnuma1"
    )


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLOW_PAGESIZE", "16")
    found = finding("environment")
    assert not found.ok and found.needed
    assert found.detail == "KVFLOW_PAGESIZE: unknown variable; did you mean KVFLOW_PAGE_SIZE?"
