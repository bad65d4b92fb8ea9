"""Put a mutant in the place of the shipped code, before or after it is imported."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from tests.proof.mutants.cells import change_cell
from tests.proof.mutants.mutant import Mutant


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Importer(importlib.abc.MetaPathFinder):
    def __init__(self, root: Path, mutant: Mutant) -> None:
        self._name, self._path, self._mutant = module_name(mutant.file), root / mutant.file, mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        loader = _Loader(name, str(self._path), self._mutant)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return mutated_code(Path(self.path), self._mutant)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if self._mutant.cell is not None:
            change_cell(module, self._mutant.cell)


def mutated_code(path: Path, mutant: Mutant) -> CodeType:
    content = path.read_bytes()
    code: CodeType = compile(
        mutant.edit.applied(content) if mutant.edit else content, str(path), "exec"
    )
    return code


class Functions:
    """The existing functions, also behind decorators, by file and qualified name of their code."""

    def __init__(self, files: set[str]) -> None:
        self._found: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        # tests/conftest.py freezes what the collection has made, and `get_objects` leaves that out.
        gc.unfreeze()
        for one in gc.get_objects():
            # By its type: `isinstance` asks the object, and some of torch's answer with a warning.
            if type(one) is FunctionType and one.__code__.co_filename in files:
                self._found[one.__code__.co_filename, one.__code__.co_qualname].append(one)

    def change(self, path: Path, mutant: Mutant) -> bool:
        """Give all of them, and those that they made, the mutant's code; False if that is
        impossible.
        """
        code = _code_named(mutated_code(path, mutant), mutant.function)
        if code is None or (str(path), mutant.function) not in self._found:
            return False
        pairs = [
            (one, new)
            for new in (code, *_inside(code))
            for one in self._found.get((str(path), new.co_qualname), [])
        ]
        names = [(id(one), new.co_qualname) for one, new in pairs]
        if len(set(names)) < len(names) or any(
            one.__code__.co_freevars != new.co_freevars for one, new in pairs
        ):
            return False
        for one, new in pairs:
            one.__code__ = new
        return True


def _inside(code: CodeType) -> list[CodeType]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [deep for one in inner for deep in (one, *_inside(one))]


def _code_named(code: CodeType, name: str) -> CodeType | None:
    """Return None for a name that is given twice, such as a property and its setter."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    found = [one for one in inner if one.co_qualname == name]
    if found:
        return found[0] if len(found) == 1 else None
    heads = (one for one in inner if name.startswith(one.co_qualname + "."))
    return next((deep for head in heads if (deep := _code_named(head, name))), None)


def import_with(root: Path, mutant: Mutant) -> None:
    if module_name(mutant.file) in sys.modules:
        raise RuntimeError(f"{mutant.file} has been imported before its mutant was installed")
    sys.meta_path.insert(0, Importer(root, mutant))
