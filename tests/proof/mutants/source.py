"""The mutants of a source file, except where only a text, a type or a name would change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.proof.mutants.mutant import Mutant, numbered
from tests.proof.mutants.operators import Around, Source, changes

TEXT_FUNCTIONS = {"__repr__", "__str__", "mermaid"}
TEXT_TARGETS = {"__slots__", "__all__"}
# At the top of a module: what they build is mutated cell by cell.
TABLE_CALLS = {"Table", "Move", "rest"}
TYPE_CALLS = {"NewType", "ParamSpec", "TypeVar"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Place(NamedTuple):
    parent: ast.AST
    scope: tuple[str, ...] = ()
    function: str = ""  # the outermost one, once in its body
    returns: str = ""
    in_enum: bool = False
    names: frozenset[str] = frozenset()
    statement: tuple[int, int] = (0, 0)
    # Lines that can be parsed by themselves: a statement of a module or a method.
    whole: tuple[int, int] = (0, 0)


def mutants_of(root: Path, file: str, texts: str = "") -> list[Mutant]:
    """`texts` matches the called names of statements that only write texts."""
    source = Source((root / file).read_bytes())
    return numbered(
        _Walk(source, file, re.compile(texts) if texts else None).node(
            source.tree, _Place(source.tree)
        )
    )


class _Walk:
    def __init__(self, source: Source, file: str, texts: re.Pattern[str] | None) -> None:
        self._source, self._file, self._texts = source, file, texts
        # Name: the first line that gives it a value, in the function at hand.
        self._bound: dict[str, int] = {}

    def node(self, node: ast.AST, place: _Place) -> Iterator[Mutant]:
        if self._is_left_alone(node, place):
            return
        if isinstance(node, ast.stmt):
            place = place._replace(statement=_header(node))
            if not place.function:
                place = place._replace(whole=(node.lineno, node.end_lineno or node.lineno))
                place = place._replace(names=_names_of(node) or place.names)
        bound = (
            frozenset(n for n, line in self._bound.items() if line < place.statement[0])
            if self._bound
            else None
        )
        if not isinstance(node, ast.Module):
            is_constructor = place.scope[-1:] == ("__init__",)
            around = Around(place.parent, place.returns, bound or frozenset(), is_constructor)
            for operator, edit in changes(self._source, node, around):
                if (place.function or operator != "statement dropped") and self._source.accepts(
                    edit, *place.whole
                ):
                    text = self._source.line(_line_of(node) or place.statement[0])
                    scope = ".".join(place.scope)
                    yield Mutant(
                        self._file,
                        scope,
                        operator,
                        text,
                        0,
                        *place.statement,
                        edit=edit,
                        function=place.function,
                        names=place.names,
                    )
        for child, inner in self._children(node, place):
            yield from self.node(child, inner)

    def _children(self, node: ast.AST, place: _Place) -> Iterator[tuple[ast.AST, _Place]]:
        inner = place._replace(parent=node)
        if isinstance(node, Function):
            scope = (*place.scope, node.name)
            for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d)):
                yield default, inner._replace(scope=scope)
            if not place.function:
                self._bound = _bound_in(node)
            returns = ast.unparse(node.returns) if node.returns else ""
            function = place.function or ".".join(scope)
            yield from (
                (one, inner._replace(scope=scope, function=function, returns=returns))
                for one in node.body
            )
            if not place.function:
                self._bound = {}
        elif isinstance(node, ast.ClassDef):
            enum = any("Enum" in ast.unparse(base) for base in node.bases)
            yield from (
                (one, inner._replace(scope=(*place.scope, node.name), in_enum=enum))
                for one in node.body
            )
        else:
            annotation = node.annotation if isinstance(node, ast.AnnAssign) else None
            yield from ((one, inner) for one in ast.iter_child_nodes(node) if one is not annotation)

    def _is_left_alone(self, node: ast.AST, place: _Place) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return node.name in TEXT_FUNCTIONS
            case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.arguments():
                return True
            case ast.Assign() if any(
                isinstance(t, ast.Name) and t.id in TEXT_TARGETS for t in node.targets
            ):
                return True
            case ast.Assign() | ast.AnnAssign() if place.in_enum and not place.function:
                return True  # a member's number is a name
            case ast.If() if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
                return True
            case ast.Call() if (
                not place.function
                and ast.unparse(node.func).split(".")[-1] in TABLE_CALLS | TYPE_CALLS
            ):
                return True
            case ast.BinOp(op=ast.BitOr()) if not place.function:
                return True  # a union of types, or rows of a table
            case ast.Subscript() if not place.function:
                return True  # type arguments
            case ast.Expr(value=ast.Call(func=called)) if self._texts and self._texts.fullmatch(
                ast.unparse(called)
            ):
                return True
        return False


def _line_of(node: ast.AST) -> int:
    line: int = getattr(node.pattern if isinstance(node, ast.match_case) else node, "lineno", 0)
    return line


def _header(node: ast.stmt) -> tuple[int, int]:
    inside = getattr(node, "body", None) or getattr(node, "cases", None)
    if inside:
        first = inside[0].lineno if hasattr(inside[0], "lineno") else inside[0].pattern.lineno
        return node.lineno, max(node.lineno, first - 1)
    return node.lineno, node.end_lineno or node.lineno


def _names_of(node: ast.stmt) -> frozenset[str]:
    """Names that code elsewhere uses for what this statement defines."""
    match node:
        case ast.Assign():
            return frozenset(
                n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)
            )
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.ClassDef(name=name):
            return frozenset({name})
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return frozenset({name})
    return frozenset()


def _bound_in(function: Function) -> dict[str, int]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    bound = {one.arg: 0 for one in named}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = min(bound.get(node.id, node.lineno), node.lineno)
    return bound
