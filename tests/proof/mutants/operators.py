"""The changes that may be made at one node of a syntax tree, as edits of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.proof.mutants.mutant import Edit

Found = Iterator[tuple[str, Edit]]

_COMPARE: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
}
_BINARY: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("+",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
    ast.BitXor: ("^", ("|",)),
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_COPIES = {"list", "sorted", "reversed", "set", "abs"}  # not what only makes a value immutable


class Source:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.tree = ast.parse(content)
        self._starts = [0]
        for line in content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def start(self, node: Any) -> int:
        line: int = node.lineno
        column: int = node.col_offset
        return self._starts[line - 1] + column

    def end(self, node: Any) -> int:
        line: int = node.end_lineno
        column: int = node.end_col_offset
        return self._starts[line - 1] + column

    def text(self, node: ast.AST) -> str:
        return self.content[self.start(node) : self.end(node)].decode()

    def accepts(self, edit: Edit, first: int, last: int) -> bool:
        """Return True if lines `first` to `last`, which hold the edit, still parse."""
        start, end = self._starts[first - 1], self._starts[last]
        part = self.content[start : edit.start] + edit.new + self.content[edit.end : end]
        try:
            ast.parse(b"if 1:\n" + part if part[:1].isspace() else part)
        except SyntaxError:
            return False
        return True

    def line(self, number: int) -> str:
        return self.content[self._starts[number - 1] : self._starts[number]].decode().strip()

    def function_at(self, first: int, last: int) -> str:
        """The outermost function whose body holds these lines whole, or ""."""

        def search(body: list[ast.stmt], scope: str) -> str:
            for node in body:
                if isinstance(node, ast.ClassDef) and (
                    found := search(node.body, f"{scope}{node.name}.")
                ):
                    return found
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    node.body[0].lineno <= first and last <= (node.end_lineno or 0)
                ):
                    return f"{scope}{node.name}"
            return ""

        return search(self.tree.body, "")

    def replaced(self, node: ast.AST, new: str) -> Edit:
        return Edit(self.start(node), self.end(node), new.encode())

    def between(self, left: ast.AST, right: ast.AST, pattern: str, new: str) -> Edit | None:
        """`pattern` between two nodes becomes `new`; parentheses and spaces stay."""
        start, end = self.end(left), self.start(right)
        gap = self.content[start:end].decode()
        found = re.search(pattern, gap)
        return found and Edit(
            start, end, (gap[: found.start()] + new + gap[found.end() :]).encode()
        )

    def without(self, one: ast.AST, others: list[ast.AST]) -> Edit:
        """Drop an element with the comma after it, or for the last one before it."""
        where = others.index(one)
        if where + 1 < len(others):
            return Edit(self.start(one), self.start(others[where + 1]), b"")
        start = self.end(others[where - 1]) if where else self.start(one)
        return Edit(start, self.end(one), b"")


class Around(NamedTuple):
    parent: ast.AST
    returns: str  # the annotation of the function's result, or ""
    bound: frozenset[str]  # local names that have a value before this statement
    is_constructor: bool


def changes(source: Source, node: ast.AST, around: Around) -> Found:
    for kind, operator in _OPERATORS.items():
        if isinstance(node, kind):
            yield from operator(source, node, around)
    if isinstance(node, ast.stmt):
        yield from _removed(source, node, around)


def _compare(source: Source, node: ast.Compare, _: Around) -> Found:
    left = node.left
    for kind, right in zip(node.ops, node.comparators, strict=True):
        old, swaps = _COMPARE[type(kind)]
        pattern = rf"\b{old}\b" if old[0].isalpha() else re.escape(old)
        for new in swaps:
            if edit := source.between(left, right, pattern, new):
                yield f"{old.replace(chr(92) + 's+', ' ')} -> {new}", edit
        left = right


def _boolean(source: Source, node: ast.BoolOp, _: Around) -> Found:
    old, new, neutral = (
        ("and", "or", "True") if isinstance(node.op, ast.And) else ("or", "and", "False")
    )
    start, parts = source.start(node), []
    for left, right in zip(node.values, node.values[1:], strict=False):
        if edit := source.between(left, right, rf"\b{old}\b", new):
            parts.append((edit.start - start, edit.end - start, edit.new))
    whole = source.content[start : source.end(node)]
    for first, last, text in reversed(parts):
        whole = whole[:first] + text + whole[last:]
    yield f"{old} -> {new}", Edit(start, source.end(node), whole)
    for number, value in enumerate(node.values):
        yield f"operand {number} of {old} -> {neutral}", source.replaced(value, neutral)


def _unary(source: Source, node: ast.UnaryOp, _: Around) -> Found:
    if isinstance(node.op, ast.Not | ast.USub):
        yield (
            "not dropped" if isinstance(node.op, ast.Not) else "minus dropped",
            Edit(source.start(node), source.start(node.operand), b" "),
        )


def _binary(source: Source, node: ast.BinOp, around: Around) -> Found:
    if _is_text(node.left) or _is_text(node.right):
        return
    if (
        isinstance(node.op, ast.BitOr)
        and isinstance(around.parent, ast.Call)
        and _is_isinstance(around.parent)
    ):
        yield "left type only", source.replaced(node, source.text(node.left))
        yield "right type only", source.replaced(node, source.text(node.right))
        return
    old, swaps = _BINARY.get(type(node.op), ("", ()))
    for new in swaps:
        if edit := source.between(node.left, node.right, re.escape(old), new):
            yield f"{old} -> {new}", edit


def _augmented(source: Source, node: ast.AugAssign, _: Around) -> Found:
    old, swaps = _BINARY.get(type(node.op), ("", ()))
    for new in (*(swap + "=" for swap in swaps), "="):
        if edit := source.between(node.target, node.value, re.escape(old + "="), new):
            yield f"{old}= -> {new}", edit


def _constant(source: Source, node: ast.Constant, around: Around) -> Found:
    if isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", source.replaced(node, str(not node.value))
    elif isinstance(node.value, int | float):
        swaps = {node.value + 1, node.value - 1 if node.value else 1}
        if isinstance(around.parent, ast.UnaryOp):
            swaps = {node.value + 1}
        for new in sorted(swaps):
            yield f"{node.value} -> {new}", source.replaced(node, f"{new}")


def _condition(source: Source, node: ast.If | ast.IfExp | ast.While, _: Around) -> Found:
    for forced in ("False",) if isinstance(node, ast.While) else ("True", "False"):
        if not isinstance(node.test, ast.Constant) or str(node.test.value) != forced:
            yield f"condition {forced}", source.replaced(node.test, forced)


def _comprehension(source: Source, node: ast.comprehension, _: Around) -> Found:
    for test in node.ifs:
        yield "filter True", source.replaced(test, "True")
        yield "filter False", source.replaced(test, "False")


def _loop(source: Source, node: ast.For, _: Around) -> Found:
    yield "loop over nothing", source.replaced(node.iter, "()")


def _returned(source: Source, node: ast.Return, around: Around) -> Found:
    if node.value is None or around.returns == "str" or isinstance(node.value, ast.Constant):
        return
    for new in ("True", "False") if around.returns == "bool" else ("None",):
        yield f"return {new}", source.replaced(node.value, new)


def _call(source: Source, node: ast.Call, _: Around) -> Found:
    if isinstance(node.func, ast.Name):
        name = node.func.id
        if name in _CALLS:
            yield f"{name} -> {_CALLS[name]}", source.replaced(node.func, _CALLS[name])
        if name in _COPIES and len(node.args) == 1 and not node.keywords:
            yield f"{name}() dropped", source.replaced(node, f"({source.text(node.args[0])})")
    arguments: list[ast.AST] = [*node.args, *node.keywords]
    arguments.sort(key=source.start)
    for keyword in node.keywords:
        if keyword.arg is not None and not _is_text(keyword.value):
            yield f"argument {keyword.arg} dropped", source.without(keyword, arguments)


def _elements(source: Source, node: ast.Tuple | ast.List | ast.Set, around: Around) -> Found:
    if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load) or _unpacked(around.parent):
        return
    if isinstance(around.parent, ast.Subscript) or any(
        isinstance(one, ast.Starred) for one in node.elts
    ):
        # A pair of indices or type arguments; a tuple built around a slice has its own constants.
        return
    for number, one in enumerate(node.elts):
        if _is_text(one):
            continue
        if len(node.elts) == 1 or isinstance(node, ast.Tuple):
            rest = [source.text(other) for other in node.elts if other is not one]
            inside = ", ".join(rest) + (
                "," if len(rest) == 1 and isinstance(node, ast.Tuple) else ""
            )
            new = (
                f"({inside})"
                if isinstance(node, ast.Tuple)
                else "[]"
                if isinstance(node, ast.List)
                else "set()"
            )
            yield f"element {number} dropped", source.replaced(node, new)
        else:
            yield f"element {number} dropped", source.without(one, list(node.elts))


def _items(source: Source, node: ast.Dict, _: Around) -> Found:
    for number, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
        if key is not None:  # else one of `**more`
            tail = re.match(rb"\s*,", source.content[source.end(value) :])
            yield (
                f"item {number} dropped",
                Edit(source.start(key), source.end(value) + (tail.end() if tail else 0), b""),
            )


def _case(source: Source, node: ast.match_case, _: Around) -> Found:
    if not all(isinstance(one, ast.Pass) for one in node.body):
        yield (
            "case does nothing",
            Edit(source.start(node.body[0]), source.end(node.body[-1]), b"pass"),
        )
    if node.guard is not None:
        yield "guard True", source.replaced(node.guard, "True")
    if isinstance(node.pattern, ast.MatchOr):
        for number, one in enumerate(node.pattern.patterns):
            rest = " | ".join(
                source.text(other) for other in node.pattern.patterns if other is not one
            )
            yield f"pattern {number} dropped", source.replaced(node.pattern, rest)


def _caught(source: Source, node: ast.ExceptHandler, _: Around) -> Found:
    if not (len(node.body) == 1 and isinstance(node.body[0], ast.Raise)):
        yield "raised again", Edit(source.start(node.body[0]), source.end(node.body[-1]), b"raise")


def _removed(source: Source, node: ast.stmt, around: Around) -> Found:
    """Drop the statement, but not the first value of a name or attribute, which Python needs."""
    match node:
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            if name not in around.bound:
                return
        case ast.Assign(targets=[ast.Tuple(elts=targets)]):
            if not all(
                isinstance(t, ast.Attribute) or getattr(t, "id", "") in around.bound
                for t in targets
            ):
                return
        case ast.Assign() | ast.AnnAssign() if around.is_constructor:
            return
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            pass
        case (
            ast.Expr()
            | ast.Assign()
            | ast.AugAssign()
            | ast.Delete()
            | ast.Raise()
            | ast.Continue()
            | ast.Break()
        ):
            pass
        case ast.Return(value=None):
            pass
        case _:
            return
    yield "statement dropped", source.replaced(node, "pass")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_isinstance(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass")


def _unpacked(parent: ast.AST) -> bool:
    """The elements go to as many targets: one less is a ValueError, which proves nothing."""
    return isinstance(parent, ast.Assign) and any(
        isinstance(target, ast.Tuple | ast.List) for target in parent.targets
    )


_OPERATORS: dict[type[ast.AST], Callable[[Source, Any, Around], Found]] = {
    ast.Compare: _compare,
    ast.BoolOp: _boolean,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.AugAssign: _augmented,
    ast.Constant: _constant,
    ast.If: _condition,
    ast.IfExp: _condition,
    ast.While: _condition,
    ast.comprehension: _comprehension,
    ast.For: _loop,
    ast.Return: _returned,
    ast.Call: _call,
    ast.Tuple: _elements,
    ast.List: _elements,
    ast.Set: _elements,
    ast.Dict: _items,
    ast.match_case: _case,
    ast.ExceptHandler: _caught,
}
