"""Every command that README.md, docs/ and examples/ print, as steps that a new user's shell takes
one after another.

`python -m tests.printed > LOG` takes them all in a new clone, with an empty home and no environment
of Python's on the PATH, and prints what they print: `make demo` sets up, and `pip install`
downloads. The tests take the same steps.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

from tests.shells import PATH, ROOT, STOP, Checkout, has_namespaces, is_free, ports_of

README, CHAT = "README.md", "examples/chat.py"
QUICKSTART, SERVE, TWO_MACHINES = "docs/quickstart.md", "docs/serve.md", "docs/two-machines.md"
# A reader of these has entered an environment before, or that of another engine, or needs none.
ELSEWHERE = (
    TWO_MACHINES,
    "docs/vllm.md",
    "docs/sglang.md",
    "examples/container/README.md",
    "examples/systemd/README.md",
)
PAGES = (
    README,
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")),
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/README.md")),
)
# What cannot run where only this repository is, by how the command begins, and what looks at it
# instead.
NOT_RUN = {
    "make test": "it is what runs these steps; a test looks whether make has the target",
    "make prove": (
        "it is minutes of simulators, which tests run bug by bug; a test looks whether make has "
        "the target"
    ),
    "pip install '.[vllm,mooncake]'": (
        "vLLM on the index is a CUDA build; .ci/setup-vllm installs one for CPUs"
    ),
    "vllm serve": "it needs vLLM: `make vllm` starts such servers",
    "pip install '.[sglang,mooncake]'": (
        "SGLang on the index needs CUDA; .ci/setup-sglang installs it for CPUs"
    ),
    "python -m sglang": "it needs SGLang: `make sglang` starts such servers",
    "kvflow router --engine vllm": (
        "it needs vLLM: `make vllm` puts a router in front of such servers"
    ),
    "kubectl": "it needs a cluster; tests/test_manifests.py checks the manifests by schema",
    "curl localhost:8000/workers": "it asks the cluster",
    "docker": "it needs a container engine; tests/test_images.py lints and checks the build file",
    "sudo": "it changes the machine; tests/test_units.py checks the units by systemd-analyze",
}
# What follows the printed options, the last of a kind counts: all that the long commands do takes
# half an hour.
LESS = {
    "make demo": 'ARGS="--transfer-backend local --requests 4 --new-tokens 16"',
    "kvflow sim --seeds": "--seeds 0:4",
    "kvflow sim --bare": "--seeds 0:20",
    "kvflow sim --cache": "--seeds 0:2",
    "kvflow sim --fleet": "--fleet 20 --rooms 500",
    "kvflow sim --group": "--seeds 0:4",
    "kvflow sim --exhaust": "--bounds small-own-pages",
    "kvflow bench transfer": "--transfer-backend local --pairs 2",
    "kvflow bench rooms": "--transfer-backend local --rounds 1",
    "kvflow bench group": "--ranks 1,2 --rounds 1 --requests 50",
    "kvflow bench serve": "--clients 2 --new-tokens 32 --turns 1 --streams 0",
    "kvflow bench abort": "--transfer-backend local --times 3 --pages 32",
    "kvflow bench offload": "--pages 16 --rounds 2",
    "kvflow bench cache": "--trace tests/bench/small_trace.jsonl --rounds 1",
    "kvflow bench overcommit": "--requests 8 --new-tokens 24 --turns 1",
}
_WAIT = (
    "until curl --silent --fail --output /dev/null localhost:8000/health; do kill -0 $! && sleep "
    "0.2; done"
)
_SERVER = re.compile(r"kvflow (up|prefill|decode|router) ")
_ENTER = re.compile(r"(python3 -m venv \S+ && )?\. \S+/bin/activate$")


class Step(NamedTuple):
    """A script of one shell. `commands` are the printed ones that it runs."""

    name: str
    script: str
    commands: tuple[str, ...]
    timeout_s: float = 60
    is_alone: bool = False  # it has a network of its own
    needs: tuple[str, ...] = ()  # modules
    is_quiet: bool = False  # it prints no error

    def take(self, checkout: Checkout) -> subprocess.CompletedProcess[str]:
        """Where no namespace can be made: at the printed ports of this machine, on its loopback."""
        if not self.is_alone:
            return checkout.shell(self.script, self.timeout_s)
        if has_namespaces():
            return checkout.alone(self.script, self.timeout_s)
        bounded = ("timeout", "--kill-after=20", str(self.timeout_s - 30))
        return checkout.shell(self.script.replace("10.0.0.", "127.0.0."), self.timeout_s, *bounded)

    @property
    def taken_ports(self) -> list[int]:
        """Those that the script is about to bind and others have: none in a network of its own."""
        return (
            []
            if not self.is_alone or has_namespaces()
            else [p for p in ports_of(self.script) if not is_free(p)]
        )


def blocks_of(page: str, language: str = "sh") -> list[str]:
    text = (ROOT / page).read_text()
    found = re.finditer(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block[2]) for block in found]


def commands_of(block: str) -> list[str]:
    """The commands of a block of shell, as printed, without comments."""
    lines = re.findall(r"^((?:.*\\\n)*.*[^\\\n])$", block, re.MULTILINE)
    return [line.partition("  #")[0].rstrip() for line in lines]


def printed() -> list[tuple[str, str]]:
    found = [
        (page, command)
        for page in PAGES
        for block in blocks_of(page)
        for command in commands_of(block)
    ]
    found = [(page, command) for page, command in found if not _ENTER.fullmatch(command)]
    for path in sorted(ROOT.glob("examples/*.py")):
        found += [(f"examples/{path.name}", command) for command in _how_to_run(path)]
    return [*found, ("examples/kvflow.toml", _config_command())]


def steps() -> list[Step]:
    """In the order of the pages; the first one sets up."""
    return [
        _demo(),
        install(),
        *_served(),
        _two_machines(),
        _configured(),
        *_long(),
        *_examples(),
        _secrets(),
        _certificate(),
    ]


def not_run(command: str) -> str:
    return next((why for beginning, why in NOT_RUN.items() if command.startswith(beginning)), "")


def less_of(command: str) -> str:
    return next((more for beginning, more in LESS.items() if command.startswith(beginning)), "")


def _block_with(beginning: str, page: str) -> tuple[str, str]:
    for block in blocks_of(page):
        for command in commands_of(block):
            if command.startswith(beginning):
                return block, command
    raise AssertionError(f"{page} prints no command that begins with {beginning!r}")


def _demo() -> Step:
    _, command = _block_with("make demo", README)
    return Step("make demo", f"{command} {less_of(command)}", (command,), 1800)


def install() -> Step:
    """The blocks of two pages that install kvflow into one environment, and a command there."""
    first, second = [
        block
        for page in (QUICKSTART, TWO_MACHINES)
        for block in blocks_of(page)
        if "pip install" in block
    ]
    made, others = first.splitlines()[0], second.splitlines(keepends=True)[1:]
    assert second.startswith(made), "another environment"
    commands = (*commands_of(first)[1:], *commands_of(second)[1:])
    return Step("install", f"{first}{''.join(others)}cd / && kvflow --help", commands, 1800)


def _served() -> list[Step]:
    one, _ = _block_with("kvflow up", QUICKSTART)
    two, _ = _block_with("kvflow prefill", SERVE)
    _, curl = _block_with("curl", QUICKSTART)
    return [
        Step(
            name,
            f"{STOP}{link}{_started(block)}\n{_WAIT}\n{request}",
            tuple(commands),
            200,
            True,
            needs,
        )
        for name, link, block, request, needs in (
            ("one machine", "", one, curl, ()),
            # M is what the page calls the reader's own model.
            ("two machines", _model_m(), two, curl.replace("kvflow-demo", "M"), ("mooncake",)),
        )
        for commands in [[curl, *commands_of(block)[1:]]]
    ]


def _started(block: str) -> str:
    lines = commands_of(block)
    return "\n".join(
        f"{line.removesuffix(' &')} >&2 &" if _SERVER.match(line) else line for line in lines
    )


def _model_m() -> str:
    return "ln -sfn kvflow/serve/demo_model M\n"


def _two_machines() -> Step:
    """The page as one shell, once it is installed: that takes a network which reaches an index."""
    first, *blocks = blocks_of(TWO_MACHINES)
    enter = commands_of(first)[0].partition(" && ")[2]
    commands = tuple(
        command
        for block in blocks
        for command in commands_of(block)
        if not _ENTER.fullmatch(command)
    )
    script = f"{STOP}{_model_m()}{enter}\n" + "\n".join(_started(block) for block in blocks)
    script += "\nrm control.key"  # examples/kubernetes makes one, too, and all steps share a clone
    return Step(TWO_MACHINES, script, commands, 300, True, ("mooncake",))


def _configured() -> Step:
    chat, up = _how_to_run(ROOT / CHAT), _config_command()
    script = f"{STOP}. .venv/bin/activate\n{up} >&2 &\n{_WAIT}\n" + "\n".join(chat)
    return Step(
        "examples/kvflow.toml, examples/chat.py", script, (up, *chat), 200, True, ("openai",)
    )


def _how_to_run(path: Path) -> list[str]:
    return re.findall(rf"python examples/{path.name}(?: \"[^\"]*\")?", path.read_text())[:1]


def _config_command() -> str:
    (command,) = re.findall(r"`(kvflow up [^`]*)`", (ROOT / "examples/kvflow.toml").read_text())
    return str(command)


def _long() -> list[Step]:
    found = []
    for page in PAGES:
        for block in blocks_of(page):
            enter, *rest = commands_of(block)
            for command in rest:
                if command.startswith(("kvflow sim", "kvflow bench", "kvflow plan")):
                    less = less_of(command)
                    found.append(
                        Step(command, f"{enter}\n{command} {less}".rstrip(), (command,), 280)
                    )
    return found


def _examples() -> list[Step]:
    found = [
        (path, _how_to_run(path))
        for path in sorted(ROOT.glob("examples/*.py"))
        if path.name != "chat.py"
    ]
    return [
        Step(
            path.name,
            "\n".join([". .venv/bin/activate", *commands]),
            tuple(commands),
            100,
            is_quiet=True,
        )
        for path, commands in found
    ]


def _secrets() -> Step:
    block, *_ = (block for block in blocks_of("examples/kubernetes/README.md") if "keygen" in block)
    enter, *rest = commands_of(block)
    commands = [line for line in rest if not not_run(line)]
    script = "\n".join([enter, *commands, "ls -l control.key && rm control.key"])
    return Step("examples/kubernetes", script, tuple(commands), 60)


def _certificate() -> Step:
    block, command = _block_with("openssl req", "docs/security.md")
    script = (
        f"{STOP}{block}\nopenssl verify -CAfile server.pem server.pem && rm server.key server.pem"
    )
    return Step("docs/security.md", script, (command,), 60)


def _log(folder: Path, wanted: list[str]) -> int:
    """Take the steps whose names have one of `wanted`, by default all. Returns how many failed."""
    checkout = Checkout(folder / "kvflow", folder / "home", PATH)
    checkout.home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout.folder)], check=True)
    failed = 0
    chosen = [step for step in steps() if not wanted or any(text in step.name for text in wanted)]
    for step in chosen:
        began = time.monotonic()
        print(
            f"\n=== {step.name}, in a new shell\n{textwrap.indent(step.script, '$ ')}", flush=True
        )
        if step.taken_ports:
            print(
                f"--- not run: ports {step.taken_ports} are in use, and no network namespace can "
                "be made"
            )
            continue
        try:
            done = step.take(checkout)
            status, out, told = str(done.returncode), done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            status, out, told = (
                "none in time",
                (error.stdout or b"").decode(),
                (error.stderr or b"").decode(),
            )
        failed += status != "0"
        print(out.rstrip(), *([told.rstrip()] if status != "0" else []), sep="\n")
        print(f"--- status {status} after {time.monotonic() - began:.0f} s", flush=True)
    print(
        "\n=== not run here", *(f"{command}: {why}" for command, why in NOT_RUN.items()), sep="\n"
    )
    print(f"\n{failed} of {len(chosen)} steps failed")
    return failed


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(min(1, _log(Path(made), sys.argv[1:])))
