"""The lists kept by hand beside this tool: scopes, named mutants, equivalent mutants."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.proof.mutants.mutant import CannotBegin, Edit, Mutant
from tests.proof.mutants.operators import Source

HERE = Path(__file__).parent


class Scope(NamedTuple):
    """An area of `mutants.toml`. Calls that match `texts` only write texts."""

    name: str
    files: tuple[str, ...]
    skip: tuple[str, ...]
    judges: tuple[str, ...]
    deselect: tuple[str, ...]
    texts: str
    most_s: float  # judges of one mutant, together: the cheapest ones that fit


def read_scopes(path: Path = HERE / "mutants.toml") -> list[Scope]:
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    texts = given.pop("texts")
    return [
        Scope(
            name,
            tuple(area["files"]),
            tuple(area.get("skip", ())),
            tuple(area["judges"]),
            tuple(area.get("deselect", ())),
            texts,
            float(area.get("most_s", "inf")),
        )
        for name, area in given.items()
    ]


def files_of(root: Path, scope: Scope, only: list[str]) -> list[str]:
    found = []
    for given in scope.files:
        path = root / given
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    files = [str(path.relative_to(root)) for path in found if path.read_bytes().strip()]
    files = [file for file in dict.fromkeys(files) if file not in scope.skip]
    return [file for file in files if not only or any(is_within(file, given) for given in only)]


def check_named(root: Path, scopes: list[Scope], only: list[str]) -> None:
    """Raises: CannotBegin for a path that names no file of any area."""
    files = [file for scope in scopes for file in files_of(root, scope, [])]
    for given in only:
        if not any(is_within(file, given) for file in files):
            raise CannotBegin(f"--files {given}: mutants.toml names no such file or folder")


def is_within(file: str, given: str) -> bool:
    given = given.rstrip("/")
    return file == given or file.startswith(given + "/")


def read_named(root: Path, path: Path = HERE / "named.toml") -> list[Mutant]:
    """Raises: CannotBegin when the text to find is not there exactly once."""
    found = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", []):
        source = Source((root / entry["file"]).read_bytes())
        old, new = entry["find"].strip("\n"), entry["replace"].strip("\n")
        if (times := source.content.count(old.encode())) != 1:
            raise CannotBegin(
                f"named mutant {entry['name']!r}: its text stands {times} times in "
                f"{entry['file']}, not once; adapt `find` in {path.name}"
            )
        start = source.content.index(old.encode())
        edit = Edit(start, start + len(old.encode()), new.encode())
        compile(edit.applied(source.content), entry["file"], "exec")
        first = source.content[:start].count(b"\n") + 1
        found.append(
            Mutant(
                entry["file"],
                "",
                entry["name"],
                entry["why"],
                0,
                first,
                first + old.count("\n"),
                edit=edit,
                function=source.function_at(first, first + old.count("\n")),
                is_named=True,
            )
        )
    return found


def read_equivalent(path: Path = HERE / "equivalent.toml") -> dict[str, str]:
    """The reason of each, by key. Raises: CannotBegin for one without a reason or given twice."""
    found: dict[str, str] = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", []):
        for key in entry["keys"]:
            if key in found:
                raise CannotBegin(f"{path.name} has this key twice: {key}")
            if not entry["reason"].strip():
                raise CannotBegin(f"{path.name} gives no reason for {key}")
            found[key] = entry["reason"]
    return found
