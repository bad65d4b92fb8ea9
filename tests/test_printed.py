"""What README.md, docs/ and examples/ print runs as printed, in the shell of a new user."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests import printed
from tests.printed import Step
from tests.shells import ROOT, Checkout, has_namespaces, set_up, with_packages_of_this_environment

STEPS = printed.steps()
SERVED = [step for step in STEPS if step.is_alone and step.name != printed.TWO_MACHINES]
(TWO_MACHINES,) = [step for step in STEPS if step.name == printed.TWO_MACHINES]
INSTALLS = [step for step in STEPS if step.name.endswith(": install")]
LONG = [
    step
    for step in STEPS
    if step.name.startswith(("make", "kvflow")) and "--seed 7" not in step.name
]
QUICK = [step for step in STEPS if step not in (*SERVED, TWO_MACHINES, *INSTALLS, *LONG)]
# The build tool and the packages are those of this environment; nothing is downloaded.
OFFLINE = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
processes = pytest.mark.xdist_group("printed")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return set_up(tmp_path_factory.mktemp("printed"))


@pytest.fixture(scope="module")
def installed(checkout: Checkout) -> Iterator[Checkout]:
    done = _installed(checkout, printed.install(printed.TWO_MACHINES))
    assert done.returncode == 0, done.stderr
    yield checkout


def _installed(checkout: Checkout, step: Step) -> subprocess.CompletedProcess[str]:
    return checkout.shell(with_packages_of_this_environment(step.script), step.timeout_s, **OFFLINE)


def named(step: Step) -> str:
    return step.name


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
            if page not in (printed.TWO_MACHINES, "docs/vllm.md") and "kvflow " in block:
                assert commands[0].endswith("/bin/activate") or commands[0].startswith("curl "), (
                    page,
                    commands[0],
                )


@pytest.mark.parametrize("step", QUICK, ids=named)
def test_quick_commands(step: Step, checkout: Checkout) -> None:
    succeeded(step, checkout)


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
@pytest.mark.parametrize("step", LONG, ids=named)
def test_long_commands_with_less_to_do(step: Step, checkout: Checkout) -> None:
    succeeded(step, checkout)


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
def test_the_quickstart_installs_a_command(checkout: Checkout) -> None:
    step = printed.install()
    done = _installed(checkout, step)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("Successfully installed kvflow") == len(step.commands)
    assert "Usage: kvflow" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@processes
@pytest.mark.parametrize("step", SERVED, ids=named)
def test_servers_answer_the_printed_request(step: Step, checkout: Checkout) -> None:
    out = succeeded(step, checkout)
    if "curl" in step.commands[0]:
        assert json.loads(out)["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@processes
def test_two_machines(installed: Checkout) -> None:
    if not has_namespaces():
        pytest.skip("no network namespace can be made here, and two addresses need one")
    out = succeeded(TWO_MACHINES, installed)
    answers = [
        json.loads(line)
        for line in re.sub(r"\}\{", "}\n{", out).splitlines()
        if line.startswith("{")
    ]
    workers, completion, to_decode, to_prefill = answers
    assert workers["stats"] == {"prefill_count": 1, "decode_count": 1, "regular_count": 0}
    assert completion["choices"][0]["text"]
    assert [(one["role"], one["switched"]) for one in (to_decode, to_prefill)] == [
        ("decode", True),
        ("prefill", True),
    ]


@pytest.mark.parametrize("name", ["sync_engine.py", "bare_endpoints.py"])
def test_an_engine_without_an_event_loop_has_none(name: str) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert not re.search(r"\b(asyncio|async|await)\b", text)
