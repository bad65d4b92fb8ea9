"""The systemd units of examples/systemd: valid for systemd, and true of kvflow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest

from kvflow.serve.config.catalog import env_of
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import resolve
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from tests.shells import ROOT

FOLDER = ROOT / "examples/systemd"
PROGRAM = "/opt/kvflow/bin/kvflow"
UNITS = {path.stem.removeprefix("kvflow-").rstrip("@"): path for path in FOLDER.glob("*.service")}
ROLES = ["router", "prefill", "decode"]
ANALYZE = shutil.which("systemd-analyze")
with_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


class _Unit(RawConfigParser):
    """A unit file. Of a key that stands there twice, the last value is kept."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, delimiters=("=",), comment_prefixes=("#",))
        self.read(path)

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def environment() -> dict[str, str]:
    lines = (FOLDER / "kvflow.env").read_text().splitlines()
    return dict(line.removeprefix("#").split("=", 1) for line in lines if "KVFLOW_" in line[:8])


def settings_of(role: str, env: dict[str, str]) -> Settings:
    """What a role makes of its unit and of the file with the environment."""
    program, command, *flags = _Unit(UNITS[role])["Service"]["ExecStart"].split()
    assert (program, command) == (PROGRAM, role)
    given: dict[str, Any] = {
        flag.removeprefix("--").replace("-", "_"): value.replace("%i", "30000")
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    # The only thing in the file that is not here.
    there = env | {env_of("model_path"): str(DEMO_MODEL_DIR)}
    return resolve(role, given, env=there)  # type: ignore[arg-type]


def test_there_is_a_unit_for_each_role() -> None:
    assert sorted(UNITS) == sorted(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_the_flags_and_variables_are_those_of_the_role(role: str) -> None:
    env = environment()
    plain = {name: value for name, value in env.items() if "TLS" not in name}
    for there in (plain, env):
        settings = settings_of(role, there)
        assert settings.api_key and settings.admin_api_key
        assert bool(settings.tls_cert and settings.tls_key and settings.tls_ca) == (there is env)
        assert settings.host == ("0.0.0.0" if role == "router" else env["KVFLOW_HOST"])
        assert settings.port == (8000 if role == "router" else 30000)
        assert settings.join == (() if role == "router" else (env["KVFLOW_JOIN"],))
    assert len(env) == len(plain) + 3


@pytest.mark.parametrize("role", ROLES)
def test_systemd_gives_a_drain_its_time_and_starts_no_usage_error_again(role: str) -> None:
    service, settings = _Unit(UNITS[role])["Service"], settings_of(role, environment())
    assert float(service["TimeoutStopSec"]) >= settings.drain_timeout_s + 10
    assert service["Type"] == "notify" and service["RestartPreventExitStatus"] == "2"
    assert service["User"] == "kvflow" and service["NoNewPrivileges"] == "yes"
    # SIGTERM to its other ranks would end what the first one still drains.
    assert role == "router" or service["KillMode"] == "mixed"


def analyzed(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on all units, with a program that exists here, as instances."""
    names = []
    for path in UNITS.values():
        name = path.name.replace("@.", "@30000.")
        (folder / name).write_text(path.read_text().replace(PROGRAM, sys.executable))
        names.append(f"./{name}")
    return subprocess.run(
        [ANALYZE or "", *words, *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


@with_systemd
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    found = analyzed("verify", "--man=no", folder=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")


@with_systemd
def test_systemd_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "kvflow-router.service"
    text = UNITS["router"].read_text()
    wrong.write_text(text.replace("PrivateTmp=yes", "PrivateTemp=yes"))
    monkeypatch.setitem(UNITS, "router", wrong)
    found = analyzed("verify", "--man=no", folder=tmp_path)
    assert "'PrivateTemp'" in found.stderr


@with_systemd
def test_systemd_calls_every_unit_well_protected(tmp_path: Path) -> None:
    """4.0 is where systemd begins to call a unit's exposure MEDIUM."""
    found = analyzed("security", "--offline=true", "--threshold=40", folder=tmp_path)
    assert found.returncode == 0, found.stdout[-2000:]
