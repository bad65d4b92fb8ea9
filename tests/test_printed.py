"""What README.md, docs/ and examples/ print runs as printed, in the shell of a new user."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from typing import Any

import pytest
import typer.main

from kvflow.bench.commands import app as bench
from kvflow.cli import app
from kvflow.plan.commands import app as plan
from kvflow.proof.sim.commands import app as sim
from tests import printed
from tests.printed import Step
from tests.shells import ROOT, Checkout, has_namespaces, set_up, with_packages_of_this_environment

STEPS = printed.steps()
SERVED = [step for step in STEPS if step.is_alone and step.name != printed.TWO_MACHINES]
(TWO_MACHINES,) = [step for step in STEPS if step.name == printed.TWO_MACHINES]
INSTALL = printed.install()
DEMO, *_ = STEPS
LONG = [step for step in STEPS if step.name.startswith("kvflow") and "--seed 7" not in step.name]
QUICK = [step for step in STEPS if step not in (DEMO, *SERVED, TWO_MACHINES, INSTALL, *LONG)]
# Tests in tests/bench run what these measure, small; the servers are those of TWO_MACHINES.
OF_A_SOAK = (
    *(f"kvflow bench {name}" for name in ("abort", "cache", "group", "offload", "overcommit")),
    *("kvflow bench transfer", "kvflow plan", "two machines"),
)
# The build tool and the packages are those of this environment; nothing is downloaded.
OFFLINE = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1"}
processes = pytest.mark.xdist_group("printed")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return set_up(tmp_path_factory.mktemp("printed"))


@pytest.fixture(scope="module")
def installed(checkout: Checkout) -> subprocess.CompletedProcess[str]:
    script = with_packages_of_this_environment(INSTALL.script)
    return checkout.shell(script, INSTALL.timeout_s, **OFFLINE)


def named(step: Step) -> str:
    return step.name


def chosen(steps: list[Step]) -> list[Any]:
    return [
        pytest.param(step, marks=pytest.mark.soak if step.name.startswith(OF_A_SOAK) else ())
        for step in steps
    ]


def succeeded(step: Step, checkout: Checkout) -> str:
    for module in step.needs:
        pytest.importorskip(module)
    if taken := step.taken_ports:
        pytest.skip(f"no network namespace can be made here, and the ports {taken} are in use")
    done = step.take(checkout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    assert done.stdout
    assert not (step.is_quiet and done.stderr), done.stderr
    return done.stdout


def test_every_printed_command_is_run_or_has_a_reason() -> None:
    run = {command for step in STEPS for command in step.commands}
    commands = [command for _, command in printed.printed()]
    assert [
        found
        for found in printed.printed()
        if found[1] not in run and not printed.not_run(found[1])
    ] == []
    assert [command for command in commands if command in run and printed.not_run(command)] == []
    assert [
        why for why in printed.NOT_RUN if not any(command.startswith(why) for command in commands)
    ] == []
    assert run <= set(commands)
    assert len(run) >= 40


def test_every_block_of_a_command_enters_an_environment() -> None:
    """A reader may begin at any of them. Those of two machines are one shell on each."""
    for page in printed.PAGES:
        for block in printed.blocks_of(page):
            commands = printed.commands_of(block)
            if page not in printed.ELSEWHERE and "kvflow " in block:
                assert commands[0].endswith("/bin/activate") or commands[0].startswith("curl "), (
                    page,
                    commands[0],
                )


@pytest.mark.parametrize("step", QUICK, ids=named)
def test_quick_commands(step: Step, checkout: Checkout) -> None:
    succeeded(step, checkout)


@pytest.mark.parametrize(
    "command", [one for step in STEPS for one in step.commands if one.startswith("kvflow ")]
)
def test_every_option_of_a_printed_command_is_read(command: str) -> None:
    _, name, *words = shlex.split(command.replace("\\\n", "").removesuffix("&"))
    found: Any = typer.main.get_command({"bench": bench, "plan": plan, "sim": sim}.get(name, app))
    if name == "bench":
        name, *words = words
    if name not in ("plan", "sim"):
        found = found.commands[name]
    assert found.make_context(name, words)


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
@pytest.mark.parametrize("step", chosen(LONG), ids=named)
def test_long_commands_with_less_to_do(step: Step, checkout: Checkout) -> None:
    succeeded(step, checkout)


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
def test_the_demo_draws_its_rooms(checkout: Checkout) -> None:
    """What a pipe sees: figures, and one room of each end in 80 columns."""
    out = succeeded(DEMO, checkout)
    assert re.search(r"tokens/s: [\d,]+ alone, [\d,]+ with 2 at once", out)
    lines = out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("comparing"))
    assert max(map(len, lines[first:])) <= 80
    good, aborted = out.split("from both sides:")[1:]
    # Whichever leg sees first that its client is gone tells the other.
    ends = "◀─── drained" if "◀─── drained" in aborted else "◀──── failed"
    for drawn, parts in (
        (good, ("◀═══ 32 pages ═══", "-> success")),
        (aborted, ("╳═══ 32 pages ═══", ends)),
    ):
        times = [float(at) for at in re.findall(r"^ +(\d+\.\d) ", drawn, re.MULTILINE)]
        assert len(times) > 5 and times == sorted(times)
        assert all(part in drawn for part in parts), drawn


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
def test_the_pages_install_a_command(installed: subprocess.CompletedProcess[str]) -> None:
    assert installed.returncode == 0, f"{installed.stdout}\n{installed.stderr}"
    count = sum("pip install" in command for command in INSTALL.commands)
    assert installed.stdout.count("Successfully installed kvflow") == count
    assert "Usage: kvflow" in installed.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
@pytest.mark.parametrize("step", chosen(SERVED), ids=named)
def test_servers_answer_the_printed_request(step: Step, checkout: Checkout) -> None:
    out = succeeded(step, checkout)
    if "curl" in step.commands[0]:
        # An answer that is drawn may end at once, without text.
        assert json.loads(out)["usage"]["completion_tokens"] > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@processes
def test_two_machines(checkout: Checkout, installed: subprocess.CompletedProcess[str]) -> None:
    assert installed.returncode == 0, installed.stderr
    if not has_namespaces():
        pytest.skip("no network namespace can be made here, and two addresses need one")
    out = succeeded(TWO_MACHINES, checkout)
    answers = [
        json.loads(line)
        for line in re.sub(r"\}\{", "}\n{", out).splitlines()
        if line.startswith("{")
    ]
    workers, completion, to_decode, to_prefill = answers
    assert workers["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 0}
    assert completion["usage"]["completion_tokens"] > 0
    assert [(one["role"], one["switched"]) for one in (to_decode, to_prefill)] == [
        ("decode", True),
        ("prefill", True),
    ]


@pytest.mark.parametrize("name", ["sync_engine.py", "bare_endpoints.py"])
def test_an_engine_without_an_event_loop_has_none(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert not re.search(r"\b(asyncio|async|await)\b", text)
