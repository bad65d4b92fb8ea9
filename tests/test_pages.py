"""The code of README.md and docs/ runs as printed, and what the pages link to and cite exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvflow
from docs.scripts import reference
from kvflow.bench.commands import app as bench
from kvflow.cli import app
from kvflow.plan.commands import app as plan
from kvflow.proof.sim.commands import app as sim
from kvflow.serve.config import catalog
from kvflow.serve.config.kv_events import KvEvents
from tests.printed import PAGES, README, blocks_of, commands_of
from tests.shells import ROOT

DOCUMENTS = (*PAGES, "ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "tests/README.md")
SNIPPET = re.compile(r'^--8<-- "(?P<path>[^":]+)(:\w+)?"$', re.MULTILINE)
# Whoever adds a language adds what checks its blocks. Text is for reading.
LANGUAGES = {"sh", "python", "json", "mermaid", "text"}
JSON = [block for page in PAGES for block in blocks_of(page, "json")]
SHELL = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [command for block in SHELL for command in commands_of(block)]
TARGETS = sorted({command for command in COMMANDS if command.startswith("make ")})
GENERATED = {f"docs/{reference.CONFIGURATION}", f"docs/{reference.METRICS}"}
# Flags of other programs that pages name, and those of kvflow's commands that are no settings.
FOREIGN = {
    *("--block-size", "--disable-hybrid-kv-cache-manager", "--kv-transfer-config"),
    *("--tensor-parallel-size", "--plane", "--help", "--tp-size", "--pp-size", "--dp-size"),
    *("--pipeline-parallel-size", "--enable-sleep-mode", "--case"),
    *("--disaggregation-decode-enable-radix-cache", "--enable-pd-role-switch"),
    *("--build-arg", "--gpus", "--time", "--ulimit"),
}


def python_blocks() -> dict[str, str]:
    found = {}
    for page in PAGES:
        for number, block in enumerate(blocks_of(page, "python")):
            found[f"{page}-{number}"] = block
    return found


PYTHON = python_blocks()


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def cited(page: str, pattern: str) -> set[str]:
    spans = re.findall(r"`([^`\n]+)`", without_code(text_of(page)))
    return {found for span in spans for found in re.findall(pattern, span)}


def flags_of_commands() -> set[str]:
    import typer.main

    found, waiting = set(), [typer.main.get_command(one) for one in (app, bench, plan, sim)]
    while waiting:
        command = waiting.pop()
        found |= {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        waiting += getattr(command, "commands", {}).values()
    return found


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_block_has_a_language_that_something_checks(page: str) -> None:
    fences = re.findall(r"^ *```(.*)$", text_of(page), re.MULTILINE)
    assert set(fences[::2]) <= LANGUAGES
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize("command", TARGETS)
def test_every_target_of_make_exists(command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *command.split()[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kvflow" in done.stdout or "pytest" in done.stdout


def test_there_is_something_to_run() -> None:
    assert {f"{README}-0", "docs/embedding.md-3", "docs/testing.md-1"} <= set(PYTHON)
    assert len(PYTHON) >= 6 and len(COMMANDS) >= 60 and JSON


@pytest.mark.parametrize("code", PYTHON.values(), ids=PYTHON)
def test_python_runs_as_printed(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "identical: True" in done.stdout


@pytest.mark.parametrize("block", JSON)
def test_json_is_what_its_reader_takes(block: str) -> None:
    for line in block.splitlines():
        value = json.loads(line)
        assert "kvflow_room" in value or KvEvents.parse(line) is not None


def test_every_extra_that_is_installed_exists() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    lines = [command for command in COMMANDS if "pip install" in command]
    lists = [found for line in lines for found in re.findall(r"\[([\w,-]+)\]", line)]
    named = {extra for found in lists for extra in found.split(",")}
    assert {"server", "engine", "mooncake"} <= named <= set(project["optional-dependencies"])


def test_every_command_that_is_shown_exists() -> None:
    shown = {name for text in COMMANDS for name in re.findall(r"^kvflow ([a-z-]+)", text)}
    command = [sys.executable, "-m", "kvflow", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    there = set(re.findall(r"[a-z-]+", done.stdout))
    assert {"up", "prefill", "decode", "router"} <= shown <= there


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_file_a_page_links_to_exists(page: str) -> None:
    text, folder = text_of(page), (ROOT / page).parent
    links = re.findall(r"\]\(([^)#: ]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", without_code(text))
    places = [(folder / (link or source)).resolve() for link, source in links]
    snippets = [ROOT / match["path"] for match in SNIPPET.finditer(text)]
    wanted = {str(path.relative_to(ROOT)) for path in (*places, *snippets)} - GENERATED
    assert [path for path in sorted(wanted) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_path_a_page_cites_exists(page: str) -> None:
    paths = cited(page, r"\b(?:kvflow|tests|examples|docs)/[\w./-]*\w")
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page != "CONTRIBUTING.md"])
def test_every_flag_a_page_cites_exists(page: str) -> None:
    known = flags_of_commands() | FOREIGN
    assert cited(page, r"(?<!\w)--[a-z][a-z0-9-]*[a-z0-9]") - known == set()


def test_every_foreign_flag_is_cited() -> None:
    assert {flag for page in DOCUMENTS for flag in cited(page, r"--[a-z-]+")} >= FOREIGN


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_metric_a_page_cites_exists(page: str) -> None:
    names = cited(page, r"(?<![\w:.])kvflow_[a-z0-9_]+\b(?!\*)") - {"kvflow_room", "kvflow_pair"}
    whole = sorted(name for name in names if not name.endswith("_"))  # others stand for a group
    assert [name for name in whole if reference.place_of(name) is None] == []


def test_the_configuration_reference_has_every_setting() -> None:
    page = reference.configuration()
    for name in catalog.FIELDS:
        assert f"### `{catalog.flag_of(name)}`" in page and f"`{catalog.env_of(name)}`" in page
        assert catalog.describe(name) in page
    assert page.count("\n### ") == len(catalog.FIELDS)


def test_the_metrics_reference_has_every_metric() -> None:
    folders = [ROOT / "kvflow" / name for name in ("http", "router", "serve/http")]
    sources = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    written = {name for text in sources for name in re.findall(r'Family\(\s*"(kvflow_\w+)"', text)}
    assert len(written) > 20
    assert [name for name in sorted(written) if reference.place_of(name) is None] == []
    kinds = {family.name: family.kind for family in reference.families()}
    assert kinds["kvflow_cache_storage_readable"] == kinds["kvflow_rank_cache_pages"] == "gauge"
    assert kinds["kvflow_retracts_total"] == "counter" and kinds["sglang:token_usage"] == "gauge"


def test_the_api_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: kvflow\.(\w+)$", text_of("docs/reference/api.md"), re.MULTILINE)
    assert sorted(shown) == sorted(kvflow.__all__)


def test_every_page_of_the_site_is_in_its_menu() -> None:
    menu = re.findall(r"^ +- .*: ([\w/-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    assert sorted(menu) == sorted(pages | {reference.CONFIGURATION, reference.METRICS})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("--prefix-cache", "reference/configuration.md#prefix_cache"),
        ("--ib-device", "reference/configuration.md#disaggregation_ib_device"),
        ("--no-such-flag", None),
        ("kvflow_retracts", "reference/metrics.md#kvflow_retracts_total"),
        ("kvflow_transfer_seconds_bucket", "reference/metrics.md#kvflow_transfer_seconds"),
        ("kvflow_no_such_metric", None),
    ],
)
def test_a_name_has_a_place_in_the_references(name: str, place: str | None) -> None:
    assert reference.place_of(name) == place


def test_names_in_texts_are_linked_and_those_in_code_are_not() -> None:
    page = "Give `--pp 2`, not\n```sh\nkvflow up `--pp 2`\n```\n# `--pp`"
    linked = page.replace("Give `--pp 2`", "Give [`--pp 2`](../reference/configuration.md#pp)")
    assert reference.with_links(page, "internals/ranks.md") == linked
