"""The nesting of JSON bodies."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.http import bodies
from kvflow.http.errors import RequestError

TEXTS = st.text(st.sampled_from('\\"[]{}a\n'))
VALUES: st.SearchStrategy[Any] = st.recursive(
    TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=40
)


def depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth, inner), default=0)


@given(value=VALUES)
def test_nesting_is_counted_outside_strings(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bodies, "MAX_NESTING", 0)
        raw, levels = msgspec.json.encode(value), depth(value)
        if not levels:
            bodies.check_nesting(raw, "it")
            return
        with pytest.raises(RequestError, match=f"^it is nested {levels} levels deep, limit 0$"):
            bodies.check_nesting(raw, "it")
