"""Errors carry their cause from leg to leg, and gain nothing on the way."""

from __future__ import annotations

import pytest

from kvflow.protocols.errors import CapacityError, Cause, Code, room_error


@pytest.mark.parametrize("code", list(Code))
@pytest.mark.parametrize("text", ["", "decode had no free pages", "capacity"])
def test_a_cause_survives_being_raised(code: Code, text: str) -> None:
    cause = Cause(code, text)
    assert room_error(room_error(cause).cause()).cause() == cause


def test_an_error_that_was_raised_here_is_its_own_cause() -> None:
    assert CapacityError("rooms", 3, 2).cause() == Cause(
        Code.CAPACITY, "rooms: asked for 3, limit 2"
    )
