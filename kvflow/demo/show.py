"""The demo's output: none for --json, text and tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvflow.demo.client import Aborted, Streamed

Show = Callable[[str], None]


class DemoOutput(Protocol):
    """Where the demo writes its progress and results."""

    def line(self, text: str) -> None: ...

    @contextmanager
    def streaming(self, prompt: str) -> Generator[Show, None, None]:
        """Yields a function for one completion's text as it comes."""
        yield lambda _: None

    def table(self, done: list[Streamed], same: list[bool], backend: str, moved: int, seconds: float) -> None: ...

    def story(self, aborted: Aborted) -> None: ...


class NoOutput(DemoOutput):
    """For --json."""

    def line(self, text: str) -> None:
        return None

    def table(self, done: list[Streamed], same: list[bool], backend: str, moved: int, seconds: float) -> None:
        return None

    def story(self, aborted: Aborted) -> None:
        return None


class TerminalOutput(DemoOutput):
    """For a terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=False)

    def line(self, text: str) -> None:
        self._console.print(text)

    @contextmanager
    def streaming(self, prompt: str) -> Generator[Show, None, None]:
        self._console.print(f"[bold cyan]{escape(prompt)}[/]", end="")
        yield lambda text: self._console.print(escape(text), end="")
        self._console.print("\n")

    def table(self, done: list[Streamed], same: list[bool], backend: str, moved: int, seconds: float) -> None:
        table = Table("prompt", title=f"{len(done)} completions over {backend}")
        for heading in ("tokens", "TTFT ms", "total ms", "same as stock"):
            table.add_column(heading, justify="right")
        for streamed, matched in zip(done, same, strict=True):
            times = (f"{streamed.ttft_s * 1e3:.0f}", f"{streamed.total_s * 1e3:.0f}")
            verdict = "[green]yes[/]" if matched else "[red]NO[/]"
            table.add_row(escape(streamed.prompt[:44]), str(len(streamed.output_ids)), *times, verdict)
        self._console.print(table)
        rate = f"{moved / seconds / 1e9:.3f} GB/s while writing" if seconds else "no write time recorded"
        self._console.print(
            f"{sum(same)} of {len(same)} identical; {moved:,} bytes moved through [bold]{backend}[/], {rate}"
        )

    def story(self, aborted: Aborted) -> None:
        table = Table("side", "at", "what", "phase", "", title=f"what happened in room {aborted.room}")
        for side, story in sorted(aborted.sides.items(), reverse=True):
            for event in story["events"]:
                at = f"{event['at_s'] * 1e3:9.1f} ms"
                table.add_row(side, at, event["what"], event["phase"], escape(event["text"]))
        self._console.print(table)
        self._console.print(
            f"{aborted.bytes_at_abort:,} of {aborted.bytes_total:,} bytes had landed when the room ended"
        )
