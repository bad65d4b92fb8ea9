"""`kvflow bench`: what is wrong with its arguments is said before anything is measured."""

from __future__ import annotations

import pytest

from kvflow.bench.commands import app
from kvflow.protocols.errors import MisuseError


@pytest.mark.parametrize("command", ["group --ranks", "rooms --open", "serve --clients"])
@pytest.mark.parametrize("numbers", ["", "2,x", "2,0", "-1", "1.5", "1,,2"])
def test_lists_of_numbers_that_are_none_get_one_line(command: str, numbers: str) -> None:
    name, option = command.split()
    if (option, numbers) == ("--open", ""):
        pytest.skip("without open rooms it measures something else")
    text = f"{option} {numbers!r} is not a list of numbers of at least 1, separated by commas"
    with pytest.raises(MisuseError) as caught:
        app([name, f"{option}={numbers}"], standalone_mode=False)
    assert str(caught.value) == text
