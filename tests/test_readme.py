"""The README holds: its Python and its commands run as printed, in a fresh shell, and what it installs exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvflow.demo_model import DEMO_MODEL_DIR
from tests.shells import ALONE, NETWORK, ROOT, STOP, has_namespaces, is_free, ports_of, shell

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The commands of a block of shell, each as printed, continuation lines and comment included."""
    return re.findall(r"^((?:.*\\\n)*.*[^\\\n])$", block, re.MULTILINE)


SH = [command for block in blocks("sh") for command in commands(block)]
SERVERS = [command for command in SH if re.match(r"kvflow (up|prefill|decode|router) ", command)]
(CURL,) = [command for command in SH if command.startswith("curl ")]
OTHERS = [command for command in SH if command.startswith("kvflow ") and command not in SERVERS]
QUICK = [command for command in OTHERS if "--seed 7" in command]
# What follows the printed options, the last of a kind counts: all that README's long commands do takes half an hour.
LESS = {
    "kvflow sim --seeds": "--seeds 0:40",
    "kvflow sim --bare": "--seeds 0:300",
    "kvflow sim --cache": "--seeds 0:20",
    "kvflow sim --group": "--seeds 0:60",
    "kvflow sim --exhaust": "--bounds eviction",
    "kvflow bench transfer": "--transfer-backend local --pairs 2",
    "kvflow bench rooms": "--transfer-backend local --rounds 1",
    "kvflow bench group": "--ranks 1,2 --rounds 1 --requests 50",
    "kvflow bench serve": "--clients 2 --new-tokens 32 --turns 1 --streams 0",
    "kvflow bench abort": "--transfer-backend local --times 3 --pages 32",
    "kvflow bench offload": "--pages 16 --rounds 2",
    "kvflow bench cache": f"--trace {ROOT / 'tests' / 'bench' / 'small_trace.jsonl'} --rounds 1",
    "kvflow bench overcommit": "--requests 8 --new-tokens 24 --turns 1",
}
WAIT = "until curl --silent --fail --output /dev/null localhost:8000/health; do kill -0 $! && sleep 0.2; done"


def test_every_command_is_run_by_a_test() -> None:
    """`pip install` is tested beside the wheel (tests/house/test_install.py), the targets of make by name below."""
    rest = set(SH) - {*SERVERS, CURL, *OTHERS}
    assert [command for command in rest if not command.startswith(("make ", "pip install "))] == []
    assert len(SERVERS) == 4 and len(OTHERS) >= 7


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("servers", [SERVERS[:1], SERVERS[1:]], ids=["one machine", "two machines"])
def test_servers_run_as_printed_and_answer_the_printed_request(servers: list[str], tmp_path: Path) -> None:
    """Where no namespace can be made: at the printed ports of this machine, if they are free, on loopback."""
    if "mooncake" in "".join(servers):
        pytest.importorskip("mooncake")
    alone = has_namespaces()
    if not alone and (taken := [port for port in ports_of(servers) if not is_free(port)]):
        pytest.skip(f"no network namespace can be made here, and the ports {taken} are in use")
    (tmp_path / "M").symlink_to(DEMO_MODEL_DIR)
    curl = CURL if len(servers) == 1 else CURL.replace("kvflow-demo", "M")  # what the README calls its own model
    started = "\n".join(f"{command.partition('  #')[0]} >&2 &" for command in servers)
    script = f"{STOP}{started}\n{WAIT}\n{curl}"
    if alone:
        done = shell(NETWORK + script, tmp_path, 200, *ALONE)
    else:
        done = shell(script.replace("10.0.0.", "127.0.0."), tmp_path, 200, "timeout", "--kill-after=20", "170")
    assert done.stdout, done.stderr
    assert json.loads(done.stdout)["choices"][0]["text"]
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", QUICK)
def test_quick_commands_run_as_printed(command: str, tmp_path: Path) -> None:
    done = shell(command, tmp_path, 60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def less_of(command: str) -> str:
    (options,) = [options for beginning, options in LESS.items() if command.startswith(beginning)]
    return f"{command.partition('  #')[0]} {options}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("command", [command for command in OTHERS if command not in QUICK])
def test_long_commands_run_as_printed_with_less_to_do(command: str, tmp_path: Path) -> None:
    done = shell(less_of(command), tmp_path, 280)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", [command for command in SH if command.startswith("make ")])
def test_every_target_of_make_exists(command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *command.partition("#")[0].split()[1:]],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kvflow" in done.stdout or "pytest" in done.stdout


def test_there_is_something_to_run() -> None:
    assert blocks("python") and blocks("sh")


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.split("\n", 1)[0])
def test_python_runs_as_printed(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "identical: True" in done.stdout


def test_every_extra_it_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines() if "pip install" in line]
    named = {extra for line in lines for extras in re.findall(r"\[([\w,-]+)\]", line) for extra in extras.split(",")}
    assert {"server", "engine", "mooncake"} <= named <= set(project["optional-dependencies"])


def test_every_command_it_shows_exists() -> None:
    shown = {match for block in blocks("sh") for match in re.findall(r"^kvflow ([a-z-]+)", block, re.MULTILINE)}
    done = subprocess.run([sys.executable, "-m", "kvflow", "--help"], capture_output=True, text=True, check=True)
    assert {"up", "prefill", "decode", "router"} <= shown <= set(re.findall(r"[a-z-]+", done.stdout))


def test_every_file_it_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
