"""The command line as a user meets it: help, version, and one clear line with exit status 2."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import kvflow
from kvflow.serve.config.catalog import FIELDS_OF_ROLE, GROUPS, describe, env_of, flag_of
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from tests.forked_roles import Nursery, run_cli

pytestmark = pytest.mark.xdist_group("cli")  # one process forks them all
ROLES = ("prefill", "decode", "router", "up")
COMMANDS = (*ROLES, "top", "demo", "bench", "plan", "sim", "doctor", "keygen", "declare-dead")
HEAVY = ("torch", "transformers", "aiohttp", "zmq", "mooncake", "nixl_cu12")
MODEL = ("--model-path", str(DEMO_MODEL_DIR), "--port", "0", "--num-pages", "16")
PREFILL = ("prefill", *MODEL, "--disaggregation-bootstrap-port", "0")


def start(code: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=cwd
    )


@pytest.fixture(autouse=True, scope="module")
def _nursery(nursery: Nursery) -> None:
    NURSERY.append(nursery)


NURSERY: list[Nursery] = []


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`kvflow ARGUMENTS` on a terminal of 80 columns, after the statements in `before`."""
    if not before:
        environment = {**os.environ, "COLUMNS": "80"}
        return run_cli(NURSERY[-1], *arguments, environment=environment)
    code = (
        f"import sys; {before}; sys.argv = ['kvflow', *{list(arguments)!r}]; from kvflow.cli "
        "import main; main()"
    )
    return start(code, cwd="/")


def refused(said: str, *arguments: str, before: str = "") -> None:
    """`kvflow ARGUMENTS` ends with status 2, and says this and nothing else."""
    done = run(*arguments, before=before)
    assert (done.stderr, done.returncode) == (f"kvflow {arguments[0]}: error: {said}\n", 2)


@functools.cache
def help_of(command: str) -> str:
    """`kvflow COMMAND --help` on a terminal of 80 columns."""
    done = run(*command.split(), "--help")
    assert done.returncode == 0 and "Usage" in done.stdout
    return done.stdout


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['kvflow', '--help']\n"
        "from kvflow.cli import main\n"
        "try: main()\n"
        f"finally: print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = start(code)
    assert done.returncode == 0
    assert all(command in done.stdout for command in COMMANDS)
    assert "heavy: []" in done.stdout


def test_the_list_of_commands_is_not_cut_off_in_80_columns() -> None:
    shown = help_of("")
    commands = shown.partition("Commands:")[2]
    assert all(command in commands for command in COMMANDS)
    assert "..." not in commands
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("role", ROLES)
def test_no_flag_and_no_word_is_cut_off_in_80_columns(role: str) -> None:
    shown = help_of(role)
    words = set(shown.replace(",", " ").split())
    flags = {flag_of(name) for name in FIELDS_OF_ROLE[role]}
    assert words >= flags, flags - words
    assert max(map(len, shown.splitlines())) <= 80
    text = " ".join(shown.split())  # a word broken behind a hyphen would have a space in it
    for name in FIELDS_OF_ROLE[role]:
        assert describe(name) in text
        assert f"env {env_of(name)})" in text


@pytest.mark.parametrize("role", ROLES)
def test_flags_stand_in_groups(role: str) -> None:
    shown = help_of(role)
    headings = ["Usage", *re.findall(r"^([A-Z][a-z]+):$", shown, re.MULTILINE)]
    groups = [g for g, names in GROUPS.items() if set(names) & set(FIELDS_OF_ROLE[role])]
    assert headings == ["Usage", *map(str.capitalize, groups), "Options"]
    if role != "router":
        assert {"serving", "model", "pool", "disaggregation", "security"} <= set(groups)
    for group in groups:
        section = (
            shown.partition(f"\n{group.capitalize()}:\n")[2]
            .partition("\n\n")[0]
            .replace(" /\n  ", " / ")
        )
        flags = set(re.findall(r"^  (--[a-z0-9-]+)", section, re.MULTILINE))
        assert flags == {flag_of(name) for name in set(GROUPS[group]) & set(FIELDS_OF_ROLE[role])}


@pytest.mark.parametrize(
    "command",
    [
        *("top", "demo", "doctor", "keygen", "declare-dead", "sim", "bench", "plan"),
        *(f"bench {name}" for name in ("rooms", "transfer", "abort", "compare", "profile")),
    ],
)
def test_the_help_of_other_commands_fits_80_columns(command: str) -> None:
    shown = help_of(command)
    assert max(map(len, shown.splitlines())) <= 80
    assert not [line for line in shown.splitlines() if re.search(r"\w(-|\.\.\.)$", line)]


@pytest.mark.parametrize("module", ["kvflow", "kvflow.cli"])
def test_as_a_module_it_calls_itself_so(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "up", "-h"], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(f"Usage: python -m {module} up [OPTIONS]\n")


@pytest.mark.parametrize("command", ["prefill-rank", "decode-rank"])
def test_a_command_for_a_worker_s_own_ranks_is_hidden_and_says_who_starts_it(command: str) -> None:
    assert command not in help_of("")
    done = run(command)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "KVFLOW_RANK is not set; the first rank of a worker starts this command" in done.stderr
    garbled = run(command, before="import os; os.environ['KVFLOW_RANK'] = '{}'")
    assert garbled.returncode == 2 and "KVFLOW_RANK cannot be read" in garbled.stderr


def test_version() -> None:
    assert run("--version").stdout == f"kvflow {kvflow.__version__}\n"


def test_familiar_flags_exist() -> None:
    words = set(
        run("prefill", "--help", before="import os; os.environ['COLUMNS'] = '300'")
        .stdout.replace(",", " ")
        .split()
    )
    familiar = """
        host port model-path model served-model-name api-key log-level page-size config threads
        disaggregation-mode disaggregation-bootstrap-port disaggregation-transfer-backend
        disaggregation-ib-device kv-events-config
    """
    assert words >= {f"--{name}" for name in familiar.split()}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("prefill",), "no model is given; set --model-path"),
        ((*PREFILL, "--page-size", "0"), "--page-size: '0': expected int >= 1"),
        (
            ("prefill", *MODEL[2:], "--model-path", "/nowhere/model"),
            "'/nowhere/model' does not exist",
        ),
        (("decode", *MODEL, "--config", "/nowhere.toml"), "/nowhere.toml"),
        (
            ("decode", *MODEL, "--transfer-backend", "pigeon"),
            "'local', 'mooncake', 'nixl', 'ascend', 'mori'",
        ),
        (
            ("decode", *MODEL, "--num-pages", "67108864"),
            "--num-pages 67108864: the pool needs 2199023255552 bytes of mem",
        ),
        (("router",), "--prefill URL"),
        (("up", "--prefill-workers", "0"), "--prefill-workers"),
        (("demo", "--transfer-backend", "pigeon"), "local, mooncake, nixl, ascend, mori"),
        (
            (
                "bench",
                "compare",
                "--tree",
                str(Path(kvflow.__file__).parents[1]),
                "--",
                "rooms",
                "--rounds",
                "1",
            ),
            "compare rooms takes no option --rounds",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_status_2(
    arguments: tuple[str, ...], part: str
) -> None:
    done = run(*arguments)
    lines = [line for line in done.stderr.splitlines() if " I kvflow." not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"kvflow {arguments[0]}: error: ")
    assert part in lines[0]
    assert done.returncode == 2


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_port_in_use(role: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        rest = ("--prefill", "http://x", "--decode", "http://y") if role == "router" else MODEL[:2]
        said = f"port {port} on 127.0.0.1 is in use; choose another one with --port"
        refused(said, role, "--port", port, *rest)


def test_a_missing_mooncake() -> None:
    said = "mooncake is not installed: pip install 'kvflow[mooncake]'"
    missing = "sys.modules['mooncake'] = None"
    refused(said, "decode", *MODEL, "--transfer-backend", "mooncake", before=missing)


def test_up_without_mooncake_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mooncake.py").write_text("raise ModuleNotFoundError('mooncake')\n")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    before = f"import os; os.environ['PYTHONPATH'] = {path!r}"
    done = run("up", "--port", "0", "--transfer-backend", "mooncake", before=before)
    assert done.stderr.count("\n") == 2, done.stderr
    first, last = done.stderr.splitlines()
    assert first == "kvflow up: starting 1 prefill, 1 decode and a router on port 0 for kvflow-demo"
    assert re.fullmatch(r"kvflow up: error: (prefill|decode): mooncake is not installed: .*", last)
    assert done.returncode == 2


def test_a_control_port_in_use_is_known_before_a_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = f"control port 127.0.0.1:{port}: Address already in use"
        refused(said, *PREFILL, "--control-port", str(port))


def test_a_name_no_hub_knows_is_one_line() -> None:
    offline = "import os; os.environ['HF_HUB_OFFLINE'] = '1'"
    done = run("decode", "--model-path", "nobody/nothing", "--port", "0", before=offline)
    assert done.stderr.startswith("kvflow decode: error: model 'nobody/nothing' cannot be loaded: ")
    assert done.stderr.count("\n") == 1 and done.returncode == 2


def test_doctor_json_is_json() -> None:
    done = run("doctor", "--json")
    assert json.loads(done.stdout)["version"] == kvflow.__version__


def test_up_ends_with_the_status_of_a_role_that_cannot_start() -> None:
    done = run("up", "--model-path", "/nowhere/model", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("kvflow up: error: ")
    assert "'/nowhere/model' does not exist" in done.stderr.splitlines()[-1]


def test_a_server_without_an_engine_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        f"sys.argv = ['kvflow', *{list(PREFILL)!r}]\n"
        "from kvflow.__main__ import main\n"
        "main()\n"
    )
    done = start(program, cwd="/")
    assert (
        done.stderr.splitlines()[-1]
        == "kvflow: error: torch is not installed: pip install 'kvflow[engine]'"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_module_that_no_extra_brings_is_not_explained_away() -> None:
    program = (
        "import sys; sys.modules['kvflow.serve.config'] = None\nfrom kvflow.__main__ import "
        "main\nmain()\n"
    )
    done = start(program, cwd="/")
    assert done.returncode == 1 and "kvflow.serve.config" in done.stderr.splitlines()[-1]
