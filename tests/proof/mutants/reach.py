"""The lines and cells that each test reaches, and those that importing reaches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch


class Tracer:
    def __init__(self, files: dict[str, str]) -> None:
        """`files`: the name to note, by the name in the code."""
        self._files = files
        self.lines: set[tuple[str, int]] = set()
        self.cells: set[tuple[str, str, str]] = set()  # module of its phases, phase, kind

    def fresh(self) -> None:
        self.lines, self.cells = set(), set()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    @contextmanager
    def watching(self, table: Any, moves: Any) -> Iterator[None]:
        """`table` is the class of all tables, `moves` that of what is looked up in them."""
        cell_of, move_of = table.cell, moves.__getitem__

        def cell(this: Any, phase: Any, kind: Any) -> Any:
            self.cells.add((this.phases.__module__, phase.name, kind.name))
            return cell_of(this, phase, kind)

        def move(this: Any, key: Any) -> Any:
            phase, kind = key
            self.cells.add((type(phase).__module__, phase.name, kind.name))
            return move_of(this, key)

        with patch.object(table, "cell", cell), patch.object(moves, "__getitem__", move):
            yield

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self.lines
        lines.add((file, frame.f_lineno))

        def line(frame: FrameType, event: str, _: Any) -> Any:
            self.lines.add((file, frame.f_lineno))
            return line

        return line
