"""JSON that a stranger wrote."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.protocols.errors import WireError
from kvflow.protocols.wire import json_text

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
        patched.setattr(json_text, "MAX_NESTING", 0)
        raw, levels = msgspec.json.encode(value), depth(value)
        if not levels:
            json_text.check_nesting(raw)
            return
        with pytest.raises(WireError, match=f"^nested {levels} levels deep, limit 0$"):
            json_text.check_nesting(raw)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[" * 4000, "nested 4000 levels deep, limit 128"),
        (b"[" * 128, "truncated"),
        (b"\xff", "malformed"),
        (b'"\xff"', "utf-8"),
        (b"", "truncated"),
    ],
)
def test_what_is_not_json_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        json_text.decode_json(raw)


def test_json_may_be_nested_up_to_its_limit() -> None:
    assert json_text.decode_json(b"[" * 128 + b"]" * 128)
