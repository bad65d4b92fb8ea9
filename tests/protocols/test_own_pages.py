"""A user's own pages for a room: as many as it needs, each once,
and the row of a pool with rows.
"""

from __future__ import annotations

import pytest

from kvflow.protocols.arguments import own_pages
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PoolLayout, build_layout


def layout(num_rows: int) -> PoolLayout:
    kinds = [
        StateKind("k", "float32", (2,)),
        *([StateKind("s", "float32", (4,), ROW)] if num_rows else []),
    ]
    return build_layout(kinds, page_size=4, num_pages=8, num_rows=num_rows)


@pytest.mark.parametrize(
    ("num_rows", "pages", "wanted", "text"),
    [
        (0, [0, 7, 7], 3, "a page is given twice"),
        (0, [0, 7], 3, "2 pages given, its prompt needs 3"),
        (0, [0, 8], 2, r"page 8 is outside 0\.\.7"),
        (
            2,
            [0, 8],
            3,
            (
                r"1 pages and 1 rows given, .* 2 pages and 1 row \(row r is given as 8 \+ r, as "
                r"the last\)"
            ),
        ),
        (2, [0, 1, 10], 3, r"page 10 is outside 0\.\.9"),
    ],
)
def test_what_is_refused(num_rows: int, pages: list[int], wanted: int, text: str) -> None:
    with pytest.raises(MisuseError, match=f"^room 7: {text}$"):
        own_pages(pages, layout(num_rows), 7, wanted)


@pytest.mark.parametrize(("num_rows", "pages"), [(0, []), (0, [7, 0]), (2, [8]), (2, [7, 0, 9])])
def test_what_is_taken(num_rows: int, pages: list[int]) -> None:
    assert own_pages(pages, layout(num_rows), 7, len(pages)).tolist() == pages
