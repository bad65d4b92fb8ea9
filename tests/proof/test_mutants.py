"""The mutation tool: what it changes and leaves alone, and how it judges."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent
from time import monotonic, sleep
from typing import Any

import pytest

from tests.proof.mutants import lists
from tests.proof.mutants.__main__ import chosen, parser
from tests.proof.mutants.changed import changed_lines, importing, touched
from tests.proof.mutants.install import Functions
from tests.proof.mutants.mutant import CannotBegin, Mutant
from tests.proof.mutants.plan import Plan
from tests.proof.mutants.scout import Survey
from tests.proof.mutants.source import mutants_of

ROOT = Path(__file__).parents[2]

LAMP = '''
"""A lamp."""
from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class Phase(IntEnum):
    OFF = 0
    ON = 1


class Press(IntEnum):
    UP = 0
    DOWN = 1


class Act(IntEnum):
    GLOW = 0


TABLE = Table(
    Phase,
    Press,
    {
        Phase.OFF: {Press.UP: Move(Phase.ON, (Act.GLOW,)), Press.DOWN: IGNORE},
        Phase.ON: rest(Press, ERROR) | {Press.DOWN: Move(Phase.OFF)},
    },
)
LIMIT_W = 3


def step(phase: Phase, press: Press) -> Phase:
    move = TABLE.moves[phase, press]
    return phase if move is None else move.phase


def is_bright(watts: int) -> bool:
    return watts > LIMIT_W


def dimmed(watts: int) -> int:
    while watts > 0:
        watts -= 1
    return watts


def never_called() -> int:
    return dimmed(1)
'''

JUDGES = """
from toy import lamp

def test_steps():
    assert lamp.step(lamp.Phase.OFF, lamp.Press.UP) is lamp.Phase.ON
    assert lamp.step(lamp.Phase.OFF, lamp.Press.DOWN) is lamp.Phase.OFF
    assert lamp.step(lamp.Phase.ON, lamp.Press.DOWN) is lamp.Phase.OFF

def test_brightness():
    assert lamp.is_bright(5) and not lamp.is_bright(3)

def test_dimming():
    assert lamp.dimmed(2) == 0
"""
SCOPE = """texts = "tell"

[lamps]
files = ["toy"]
judges = ["judges/test_lamp.py"]
"""


def found(tmp_path: Path, source: str, texts: str = "") -> list[Mutant]:
    (tmp_path / "one.py").write_text(dedent(source))
    return mutants_of(tmp_path, "one.py", texts)


def shown(tmp_path: Path, mutants: Iterable[Mutant]) -> list[str]:
    content = (tmp_path / "one.py").read_bytes()
    return [mutant.edit.applied(content).decode().strip() for mutant in mutants if mutant.edit]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        ("x = a is not b", ["x = a is b"]),
        ("x = (a) not in (b)", ["x = (a) in (b)"]),
        ("x = a and b", ["x = a or b", "x = True and b", "x = a and True"]),
        ("x = not a", ["x =  a"]),
        ("x = a + b", ["x = a - b"]),
        ("x = 7", ["x = 6", "x = 8"]),
        ("x = True", ["x = False"]),
        ("x = -1", ["x =  1", "x = -2"]),
        ("x = (A, B)", ["x = (B,)", "x = (A,)"]),
        (
            "x = {A: 1 * b, **c}",
            ["x = { **c}", "x = {A: 2 * b, **c}", "x = {A: 0 * b, **c}", "x = {A: 1 + b, **c}"],
        ),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = list(a)", ["x = (a)"]),
        ("x = f(a, b=c)", ["x = f(a)"]),
        ("x = [a for a in b if c]", ["x = [a for a in b if True]", "x = [a for a in b if False]"]),
    ],
)
def test_what_becomes_of_an_expression(tmp_path: Path, before: str, after: list[str]) -> None:
    assert sorted(shown(tmp_path, found(tmp_path, before))) == sorted(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.x = a", {"pass"}),
        ("f(a)", {"pass"}),
        ("del self.x[a]", {"pass"}),
        ("raise Error", {"pass"}),
        ("x = a", set()),  # the first value of a local name
        ("a = b", {"pass"}),  # another one for an argument
        ("a += b", {"a -= b", "a = b", "pass"}),
        ("return a", {"return None"}),
        ("if a: f()", {"if True: f()", "if False: f()", "if a: pass"}),
        ("while a: f()", {"while False: f()", "while a: pass"}),
        ("for x in a: f()", {"for x in (): f()", "for x in a: pass"}),
        (
            "return a if b else self",
            {"return None", "return a if True else self", "return a if False else self"},
        ),
    ],
)
def test_what_becomes_of_a_statement(tmp_path: Path, before: str, after: set[str]) -> None:
    head = "def f(self, a, b):\n    "
    assert set(shown(tmp_path, found(tmp_path, head + before))) == {head + one for one in after}


def test_cases_and_handlers(tmp_path: Path) -> None:
    source = """
    def f(a):
        match a:
            case 1 | 2 if a > b:
                g()
        try:
            g()
        except Error:
            pass
    """
    operators = {mutant.operator for mutant in found(tmp_path, source)}
    assert {
        "case does nothing",
        "guard True",
        "pattern 0 dropped",
        "pattern 1 dropped",
        "raised again",
    } <= operators


@pytest.mark.parametrize(
    "source",
    [
        '"""A text."""\nx = "text"\ny = f"text {1 + 2}"',
        "def f(a: int | None) -> list[int]: ...",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import x",
        "class A(IntEnum):\n    B = 1",
        (
            "class A:\n    __slots__ = ('a', 'b')\n    def __repr__(self):\n        return self.a "
            "+ self.b"
        ),
        "_FAIL = Move(P.FAILED, (C.TELL, C.END))",
        "class A:\n    def __init__(self, a):\n        self.a = a",
        "def f(self):\n    self.story.tell('a', 1 + 2)",
    ],
)
def test_texts_types_and_names_are_left_alone(tmp_path: Path, source: str) -> None:
    assert found(tmp_path, source, texts=r"(.*\.)?tell") == []


def test_a_key_survives_edits_elsewhere(tmp_path: Path) -> None:
    before = found(tmp_path, "def f(a):\n    if a > 1:\n        g()\n    if a > 1:\n        h()")
    after = found(
        tmp_path,
        "import x\n\ndef f(a):\n    i(a)\n    if a > 1:\n        g()\n    if a > 1:\n        h()",
    )
    assert len({mutant.key for mutant in before}) == len(before)
    assert {mutant.key for mutant in before} < {mutant.key for mutant in after}


def test_named_mutants_stand_exactly_once(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f(a):\n    return g(a)\n\n\ndef h(a):\n    return g(a)\n")
    entry = '[[mutant]]\nname = "n"\nfile = "one.py"\nwhy = "w"\n'
    path = tmp_path / "named.toml"
    path.write_text(
        entry + 'find = "def h(a):\\n    return g(a)"\nreplace = "def h(a):\\n    return a"\n'
    )
    (mutant,) = lists.read_named(tmp_path, path)
    assert mutant.key == "named n" and shown(tmp_path, [mutant])[0].endswith(
        "def h(a):\n    return a"
    )
    path.write_text(entry + 'find = "return g(a)"\nreplace = "return a"\n')
    with pytest.raises(CannotBegin, match="stands 2 times in one"):
        lists.read_named(tmp_path, path)


def test_equivalent_mutants_need_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "equivalent.toml"
    path.write_text('[[equivalent]]\nreason = " "\nkeys = ["k"]\n')
    with pytest.raises(CannotBegin, match="no reason for k"):
        lists.read_equivalent(path)


def test_the_lists_of_this_tree_fit_it() -> None:
    scopes = lists.read_scopes()
    areas = ["protocols", "memory", "transports", "engine", "cache", "server", "connectors"]
    assert [scope.name for scope in scopes] == areas
    for scope in scopes:
        assert lists.files_of(ROOT, scope, [])
        assert all(
            (ROOT / path.partition("::")[0]).exists()
            for path in (*scope.judges, *scope.deselect, *scope.skip)
        )
    texts = {file: scope.texts for scope in scopes for file in lists.files_of(ROOT, scope, [])}
    assert all(mutant.file in texts for mutant in lists.read_named(ROOT))
    keys = {key for key in lists.read_equivalent() if ":: TABLE ::" not in key}
    named = {key.partition(" :: ")[0] for key in keys}
    assert keys <= {mutant.key for file in named for mutant in mutants_of(ROOT, file, texts[file])}
    with pytest.raises(CannotBegin, match="no such file"):
        lists.check_named(ROOT, scopes, ["kvflow/no_such_file.py"])


def test_a_function_is_changed_in_place_although_the_collector_has_frozen_it(
    tmp_path: Path,
) -> None:
    """As tests/conftest.py freezes all that collecting the judges has made."""
    mutants = found(tmp_path, "def f(a, b):\n    return a + b\n")
    (mutant,) = (one for one in mutants if "a - b" in shown(tmp_path, [one])[0])
    path = tmp_path / "one.py"
    names: dict[str, Any] = {}
    exec(compile(path.read_bytes(), str(path), "exec"), names)
    assert names["f"](5, 2) == 7
    gc.freeze()
    try:
        assert Functions({str(path)}).change(path, mutant)
    finally:
        gc.freeze()  # as it was for the tests that follow
    assert names["f"](5, 2) == 3


class Toy:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.write("toy/lamp.py", LAMP)
        self.write("judges/test_lamp.py", JUDGES)
        self.write("mutants.toml", SCOPE)
        self.write("named.toml", "")
        self.write("equivalent.toml", "")

    def write(self, name: str, text: str) -> None:
        (self._root / name).parent.mkdir(exist_ok=True)
        (self._root / name).write_text(text)

    def judged(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        program = (
            "import sys, pathlib; from tests.proof.mutants.__main__ import main;"
            "here = pathlib.Path.cwd(); sys.exit(main(sys.argv[1:], here, here))"
        )
        environment = {**os.environ, "PYTHONPATH": f"{self._root}{os.pathsep}{ROOT}"}
        command = [
            sys.executable,
            "-c",
            program,
            "--json",
            "out.json",
            "--patience-s",
            "2",
            *arguments,
        ]
        done = subprocess.run(
            command, cwd=self._root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, (
            done.stdout + done.stderr
        )
        report: dict[str, Any] = json.loads((self._root / "out.json").read_text())
        report["outcomes"] = {
            one["key"].removeprefix("toy/lamp.py :: "): one["outcome"] for one in report["mutants"]
        }
        return done.returncode, report


loaded = pytest.mark.timeout(300)  # some dozens of processes, one after the other


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


@pytest.mark.slow
@loaded
def test_every_mutant_is_judged(toy: Toy) -> None:
    status, report = toy.judged()
    outcomes = report["outcomes"]
    assert status == 1 and report["judged"] == report["total"] == len(outcomes)
    # In place, by a judge; imported anew; and by what a cell does.
    assert outcomes["is_bright :: > -> <= :: return watts > LIMIT_W :: 0"] == "killed"
    assert outcomes["(module) :: 3 -> 2 :: LIMIT_W = 3 :: 0"] == "killed"
    assert outcomes["TABLE :: phase OFF :: OFF x UP: ON GLOW :: 0"] == "killed"
    assert outcomes["TABLE :: cell ERROR :: OFF x DOWN: IGNORE :: 0"] == "killed"
    # No judge asks about 4 W, commands, or what the table excludes; an even number is dimmed; one
    # function is not run.
    assert {key for key, outcome in outcomes.items() if outcome != "killed"} == {
        "(module) :: 3 -> 4 :: LIMIT_W = 3 :: 0",
        "TABLE :: without GLOW :: OFF x UP: ON GLOW :: 0",
        "TABLE :: with GLOW :: ON x DOWN: OFF :: 0",
        "TABLE :: cell IGNORE :: ON x UP: ERROR :: 0",
        "TABLE :: cell ON GLOW :: ON x UP: ERROR :: 0",
        "TABLE :: cell OFF :: OFF x DOWN: IGNORE :: 0",
        "dimmed :: 1 -> 2 :: watts -= 1 :: 0",
        "never_called :: 1 -> 0 :: return dimmed(1) :: 0",
        "never_called :: 1 -> 2 :: return dimmed(1) :: 0",
        "never_called :: return None :: return dimmed(1) :: 0",
    }
    assert report["unreached"] == 3
    # `watts -= 1` that adds, or is not there, never ends.
    assert report["by_time_limit"] >= 2


@loaded
def test_equivalent_named_and_stale(toy: Toy) -> None:
    toy.write(
        "named.toml",
        '[[mutant]]\nname = "n"\nfile = "toy/lamp.py"\nfind = "> LIMIT_W"\nreplace = ">= '
        'LIMIT_W"\nwhy = "w"',
    )
    true, untrue = "without GLOW :: OFF x UP: ON GLOW", "cell ERROR :: OFF x DOWN: IGNORE"
    keys = [f"toy/lamp.py :: TABLE :: {text} :: 0" for text in (true, untrue)]
    toy.write("equivalent.toml", f'[[equivalent]]\nreason = "r"\nkeys = {json.dumps(keys)}\n')
    status, report = toy.judged("--only", "GLOW", "OFF x UP")
    assert (report["equivalent"], report["stale"]) == (
        2,
        0,
    ) and f"TABLE :: {true} :: 0" not in report["outcomes"]
    assert status == 0 and report["survivors"] == 0
    status, report = toy.judged("--recheck", "--only", "OFF x DOWN", "cell ERROR")
    assert status == 1 and report["wrongly_equivalent"] == 1
    toy.write("equivalent.toml", '[[equivalent]]\nreason = "r"\nkeys = ["toy/lamp.py :: gone"]\n')
    status, report = toy.judged("--only", "named n")
    assert report["outcomes"] == {"named n": "killed"}
    assert status == 1 and report["stale_keys"] == ["toy/lamp.py :: gone"]


def test_a_sample_is_drawn_by_its_seed(tmp_path: Path) -> None:
    mutants = found(tmp_path, LAMP)
    drawn = [
        chosen(mutants, parser().parse_args(["--sample", "3", "--seed", seed]))
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 3
    only = chosen(mutants, parser().parse_args(["--only", "is_bright", ">="]))
    assert [mutant.operator for mutant in only] == ["> -> >="]


def test_changed_lines_and_who_imports_them(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    for name, text in (
        ("kvflow/one.py", "def f(a):\n    return a > 1\n\n\ndef g(a):\n    return a > 2\n"),
        ("kvflow/two.py", "x = 1\n"),
        ("tests/test_one.py", "from kvflow.one import f\n"),
        ("tests/test_both.py", "from kvflow import one\nimport kvflow.two\n"),
        ("tests/test_other.py", "import kvflow.ones\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    with pytest.raises(CannotBegin, match="HEAD~1"):
        changed_lines(tmp_path, "")
    (tmp_path / "kvflow/one.py").write_text(
        "def f(a):\n    return a > 1\n\n\ndef g(a):\n    return a > 3\n"
    )
    (tmp_path / "kvflow/two.py").write_text("")
    git("commit", "--quiet", "--all", "--message", "two")
    lines = changed_lines(tmp_path, "")
    assert lines == changed_lines(tmp_path, "HEAD~1") == {"kvflow/one.py": {6}}
    mutants = mutants_of(tmp_path, "kvflow/one.py")
    assert {mutant.scope for mutant in touched(mutants, lines)} == {"g"}
    assert set(importing(tmp_path, ("tests",), list(lines))) == {
        "tests/test_one.py",
        "tests/test_both.py",
    }
    assert (
        importing(tmp_path, ("tests",), ["kvflow/one.py", "kvflow/two.py"])[0]
        == "tests/test_both.py"
    )


def test_a_mutant_is_brought_before_the_cheapest_judges_that_fit(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text("")
    (mutant, *_) = found(tmp_path, "def f(a):\n    return a > 1\n")
    seconds = {
        f"judges.py::{name}": cost
        for name, cost in (("dear", 30.0), ("cheap", 1.0), ("middling", 5.0))
    }
    survey = Survey(("one.py",), seconds, [], {}, {"one.py": {2: set(seconds)}}, {}, [])
    for most_s, names in ((3.0, ["cheap"]), (10.0, ["cheap", "middling"]), (0.5, ["cheap"])):
        asked = Plan(tmp_path, survey, 5.0, most_s).judges_of(mutant)
        assert asked == [f"judges.py::{name}" for name in names]


def runs(stat: Path) -> bool:
    try:
        return stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_killed_tool_has_forked_ends_with_it() -> None:
    script = (
        "import time; from tests.proof.mutants.forks import fork; print(fork(lambda: "
        "time.sleep(600)), flush=True)"
    )
    tool = subprocess.Popen(
        [sys.executable, "-c", f"{script}; time.sleep(600)"], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert tool.stdout is not None
    child = Path("/proc", tool.stdout.readline().decode().strip(), "stat")
    tool.kill()
    tool.communicate()
    deadline = monotonic() + 20
    while runs(child):
        assert monotonic() < deadline, "it still runs"
        sleep(0.02)
