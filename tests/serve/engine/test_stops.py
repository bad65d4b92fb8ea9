"""Stop strings in text that comes in pieces: found and held back exactly, at any length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from kvflow.protocols.errors import MisuseError
from kvflow.serve.engine.scheduler.stops import MAX_STOP_CHARACTERS, MAX_STOPS, StopStrings
from kvflow.serve.engine.scheduler.text import TextStream

PIECES = ("a", "b", "ab", "ba", "aab", "bbaba", "c", "é🙂", "aaaaaaaaaaaaaaaa")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each of `PIECES`, of one character or several."""
    found = Tokenizer(WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token="c"))
    found.decoder = decoders.Fuse()
    return found


def looked_at_whole(
    pieces: list[str], stops: list[str], include_stop: bool
) -> tuple[list[str], str | None]:
    """Return what each piece releases, and the stop string, by comparing everything."""
    released: list[str] = []
    pending = ""
    for piece in pieces:
        pending += piece
        found = [
            (pending.index(stop), order, stop)
            for order, stop in enumerate(stops)
            if stop in pending
        ]
        if found:
            start, _, stop = min(found)
            return [*released, pending[: start + len(stop) * include_stop]], stop
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(one) for one in beginnings if pending.endswith(one)), default=0)
        released.append(pending[: len(pending) - held])
        pending = pending[len(pending) - held :]
    return [*released, pending], None


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=30),
    stops=st.lists(st.text("abc🙂", min_size=1, max_size=7), max_size=6),
    include_stop=st.booleans(),
)
def test_every_piece_releases_what_a_comparison_of_everything_says(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str], include_stop: bool
) -> None:
    stream = TextStream(tokenizer, stops, include_stop=include_stop)
    released: list[str] = []
    for token in tokens:
        released.append(stream.feed(token))
        if stream.stopped is not None:
            break
    else:
        released.append(stream.finish())
    assert (released, stream.stopped) == looked_at_whole(
        [PIECES[token] for token in tokens], stops, include_stop
    )


def lines_executed(work: Callable[[], Any]) -> int:
    """How many lines of Python `work` runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(("number", "length"), [(1, 16), (1, MAX_STOP_CHARACTERS), (MAX_STOPS, 32)])
@pytest.mark.parametrize("last", [True, False], ids=["differ at the end", "differ in the middle"])
def test_a_text_that_nearly_matches_costs_the_same_for_all_stop_strings(
    tokenizer: Tokenizer, number: int, length: int, last: bool
) -> None:
    """Ten lines a character and ten a piece, however many strings there are."""
    others = [chr(0x4E00 + i) for i in range(number)]
    half = length // 2
    stops = [
        "a" * (length - 1) + one if last else "a" * half + one + "a" * (length - half - 1)
        for one in others
    ]
    stream = TextStream(tokenizer, StopStrings(stops))
    text = [PIECES.index("a" * 16)] * 300 + [PIECES.index("c")]
    released: list[str] = []

    def feed() -> None:
        released.extend(map(stream.feed, text))

    count = lines_executed(feed)
    characters = sum(len(PIECES[token]) for token in text)
    assert "".join(released) + stream.finish() == "a" * 4800 + "c" and stream.stopped is None
    assert count < 10 * characters + 10 * len(text)


def test_limits_are_in_the_text_of_the_refusal() -> None:
    StopStrings(["x"] * MAX_STOPS)
    StopStrings(["x" * MAX_STOP_CHARACTERS])
    with pytest.raises(MisuseError, match=f"stop: {MAX_STOPS + 1} strings, limit {MAX_STOPS}"):
        StopStrings(["x"] * (MAX_STOPS + 1))
    wanted = (
        f"stop: {MAX_STOP_CHARACTERS + 1} characters in all strings, limit {MAX_STOP_CHARACTERS}"
    )
    with pytest.raises(MisuseError, match=wanted):
        StopStrings(["x" * MAX_STOP_CHARACTERS, "y"])


def test_one_automaton_serves_all_that_share_its_strings() -> None:
    made = StopStrings(["a", "b"])
    assert StopStrings(made) is made
