"""The request fields of OpenAI, SGLang and vLLM, in a table that shows how kvflow treats them.

The table is read from FIELDS.md in this folder, which also documents the fields for users. A field
that would change the answer but is not implemented is refused with a 400 that names it, unless its
value has no effect. Fields that are not in the table are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

WORKS, REFUSED, HARMLESS = "works", "refused", "harmless"

BODIES = {
    "c": "chat completions",
    "t": "completions",
    "g": "/generate",
    "s": "sampling_params of /generate",
    "o": "stream_options",
    "k": "/tokenize",
    "d": "/detokenize",
    "m": "/v1/messages",
    "e": "/v1/messages/count_tokens",
    "r": "/v1/responses",
}
SOURCES = {"A": "Anthropic", "O": "OpenAI", "S": "SGLang", "V": "vLLM", "K": "kvflow"}
_LETTERS = {name: letter for names in (BODIES, SOURCES) for letter, name in names.items()}
UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})
_PAGE = Path(__file__).with_name("FIELDS.md")
_VALUE = re.compile("`(.*?)`")  # the text between the backticks is JSON


class Field(NamedTuple):
    """One field. `bodies` and `known_to` are strings of letters: keys of `BODIES` and `SOURCES`.

    If the value of a refused field is in `accepts`, the field has no effect and is let through.
    Tests send `example`, which is not in `accepts`.
    """

    name: str
    bodies: str
    known_to: str
    accepts: tuple[Any, ...] = UNSET
    example: Any = True

    def changes_nothing(self, value: Any) -> bool:
        """Return True if a refused field has no effect with this value."""
        # In Python False == 0, but a field that accepts one of them need not accept the other.
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in self.accepts
        )


def _tables() -> Iterator[tuple[str, tuple[Field, ...]]]:
    for section in _PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, table = section.partition("\n")
        head, _, *rows = table.strip().splitlines()
        columns = _cells(head)
        yield (
            heading.lower(),
            tuple(_field(dict(zip(columns, _cells(row), strict=True))) for row in rows),
        )


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def _field(row: dict[str, str]) -> Field:
    accepts = tuple(json.loads(value) for value in _VALUE.findall(row.get("without effect", "")))
    (example,) = _VALUE.findall(row.get("example", "`true`"))
    return Field(
        row["field"].strip("`"),
        _letters(row["in"]),
        _letters(row["of"]),
        accepts or UNSET,
        json.loads(example),
    )


def _letters(cell: str) -> str:
    return "".join(_LETTERS[name] for name in cell.split(", "))


TABLE = dict(_tables())


def refused_in(body: str) -> dict[str, Field]:
    """Return the fields refused in bodies of kind `body` (a key of `BODIES`), by name."""
    return {field.name: field for field in TABLE[REFUSED] if body in field.bodies}
