"""Help pages for terminals of 80 columns. Options are grouped, and no flag, value or word is broken
across lines.

At this width, rich truncates long flags, and click breaks `--num-pages` after a hyphen.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

# The width of the column for flags. The text of a longer flag begins on the next line.
FLAGS_WIDTH = 24
_GAP = 2
_Function = TypeVar("_Function", bound=Callable[..., Any])


class App(typer.Typer):
    """A Typer app whose options are grouped by `rich_help_panel`, in order of appearance."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=_Group,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            add_completion=False,
            no_args_is_help=settings.pop("no_args_is_help", True),
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def command(self, *names: Any, **settings: Any) -> Callable[[_Function], _Function]:
        return super().command(*names, cls=_Command, **settings)


class _Command(TyperCommand):
    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        _write_text(formatter, self.help)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(formatter, self.get_params(ctx), ctx)


class _Group(TyperGroup):
    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        _write_text(formatter, self.help)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(formatter, self.get_params(ctx), ctx)
        commands = [
            (name, self.commands[name])
            for name in self.list_commands(ctx)
            if not self.commands[name].hidden
        ]
        if commands:
            rows = [
                (name, c.short_help or inspect.cleandoc(c.help or "").split("\n\n")[0])
                for name, c in commands
            ]
            _write_section(formatter, "Commands", rows, max(len(name) for name, _ in rows))


def _write_text(formatter: Any, text: str | None) -> None:
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        formatter.write_paragraph()
        formatter.write("".join(f"  {line}\n" for line in _wrapped(paragraph, formatter.width - 2)))


def _write_options(formatter: Any, params: Iterable[Any], ctx: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        if record is not None:
            heading = "Arguments" if param.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(param, "rich_help_panel", None) or heading, []).append(record)
    # All groups use the same width, so that the texts of a page are aligned.
    width = max((len(flags) for records in groups.values() for flags, _ in records), default=0)
    for heading, records in groups.items():
        _write_section(formatter, heading, records, min(width, FLAGS_WIDTH))


def _write_section(
    formatter: Any, heading: str, rows: Iterable[tuple[str, str]], width: int
) -> None:
    indent = " " * (2 + width + _GAP)
    with formatter.section(heading):
        for first, text in rows:
            # The text begins on the same line as its flags if they fit into their column.
            lines = _wrapped(text, formatter.width - len(indent))
            beside = lines.pop(0) if len(first) <= width and lines else ""
            # A list of choices may be longer than a line.
            parts = _wrapped(first.replace("|", "| "), formatter.width - 2)
            *above, last = (part.replace("| ", "|") for part in parts)
            formatter.write("".join(f"  {line}\n" for line in above))
            formatter.write(f"  {last:<{width + _GAP}}{beside}".rstrip() + "\n")
            formatter.write("".join(f"{indent}{line}\n" for line in lines))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
