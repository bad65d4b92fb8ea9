"""The demo's output: text and tables on a terminal, or only progress lines with --json."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvflow.serve.demo.client import Streamed
from kvflow.serve.demo.timeline import draw

Show = Callable[[str], None]
# Longer prompts are cut, so that a table fits into 80 columns.
PROMPT_WIDTH = 32


class DemoOutput(Protocol):
    """A destination for progress and results. Each call flushes its output, even to a pipe."""

    def line(self, text: str) -> None: ...

    @contextmanager
    def streaming(self, prompt: str) -> Generator[Show, None, None]:
        """Yield a function that shows more text of one completion as it arrives."""
        yield lambda _: None

    def table(self, done: list[Streamed], same: list[bool], backend: str) -> None: ...

    def room(self, title: str, sides: dict[str, Any]) -> None:
        """Draw the events of one room on both sides."""


class ProgressOutput(DemoOutput):
    """Output with --json: progress lines on stderr."""

    def __init__(self) -> None:
        # stdout must contain only the JSON objects.
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        self._console.print(text)

    def table(self, done: list[Streamed], same: list[bool], backend: str) -> None:
        return None

    def room(self, title: str, sides: dict[str, Any]) -> None:
        return None


class TerminalOutput(DemoOutput):
    """Output for a terminal: text, tables and drawings."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=False)

    def line(self, text: str) -> None:
        self._console.print(text)

    @contextmanager
    def streaming(self, prompt: str) -> Generator[Show, None, None]:
        self._console.print(f"[bold cyan]{escape(prompt)}[/]", end="")
        yield lambda text: self._console.print(escape(text), end="")
        self._console.print("\n")

    def table(self, done: list[Streamed], same: list[bool], backend: str) -> None:
        table = Table(title=f"{len(done)} completions over {backend}")
        table.add_column("prompt", no_wrap=True, max_width=PROMPT_WIDTH)
        for heading in ("tokens", "TTFT\nms", "total\nms", "tokens\n/s", "as\nstock"):
            table.add_column(heading, justify="right", no_wrap=True)
        for streamed, matched in zip(done, same, strict=True):
            times = (
                f"{streamed.ttft_s * 1e3:.0f}",
                f"{streamed.total_s * 1e3:.0f}",
                f"{streamed.tokens_per_s:.0f}",
            )
            verdict = "[green]yes[/]" if matched else "[red]NO[/]"
            table.add_row(escape(streamed.prompt), str(len(streamed.output_ids)), *times, verdict)
        self._console.print(table)

    def room(self, title: str, sides: dict[str, Any]) -> None:
        self._console.print(f"\n[bold]{escape(title)}[/]")
        for line in draw(sides):
            self._console.print(escape(line), soft_wrap=True)
        self._console.print()
