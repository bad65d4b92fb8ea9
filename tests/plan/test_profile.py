"""Profiles: the fit finds the factors behind the points, and a saved profile is the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvflow.plan.profile import Prompted, StepTimes, load_profile, non_negative_fit, steps_of
from kvflow.protocols.errors import MisuseError
from tests.plan import profiles as known


def test_the_fit_finds_what_the_points_were_made_of() -> None:
    times = StepTimes(known.profile())
    assert times.base_s == pytest.approx(known.BASE_S, rel=0.01)
    assert times.token_s == pytest.approx(known.TOKEN_S, rel=0.01)
    assert times.pair_s == pytest.approx(known.PAIR_S, rel=0.01)
    assert times.busy_s == pytest.approx(known.BUSY_S, rel=0.01)
    # A request is busy for a part of the time that it takes beside its steps.
    assert times.request_s + times.busy_s == pytest.approx(known.REQUEST_S, rel=0.01)
    assert times.context_s == pytest.approx(known.CONTEXT_S, rel=0.01)


def test_prompts_at_once_share_the_steps_that_the_fit_counts() -> None:
    steps = list(steps_of(Prompted(200, 3, 1.0), chunk=128, batch=300))
    first, second, third = steps
    assert first == [(128, 0), (128, 0), (44, 0)]
    assert second == [(72, 128), (72, 128), (128, 44)]
    assert third == [(28, 172)]


def test_a_decode_step_is_interpolated_and_goes_on_in_a_line() -> None:
    times = StepTimes(known.profile())
    for batch in (1, 3, 8, 100):
        expected = known.STEP_S + batch * known.ROW_S
        assert times.decode_step_s(batch, batch * times._reference) == pytest.approx(expected)
    longer = times.decode_step_s(4, 4 * (times._reference + 1000))
    expected = known.STEP_S + 4 * known.ROW_S + 4000 * known.CONTEXT_S
    assert longer == pytest.approx(expected, rel=0.01)


def test_no_factor_is_negative() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_fit(rows, np.array([3.0, 2.0, 1.0])).min() >= 0
    assert non_negative_fit(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


def test_a_saved_profile_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    known.profile().save(path)
    assert load_profile(path) == known.profile()
    with pytest.raises(MisuseError, match=r"--save .*: No such file"):
        known.profile().save(tmp_path / "nowhere" / "profile")


def test_a_profile_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "profile"
    with pytest.raises(MisuseError, match=r"--profile .*: No such file"):
        load_profile(path)
    path.write_text('{"model": 1}')
    with pytest.raises(MisuseError, match=r"--profile .*Expected `str`"):
        load_profile(path)
    for change, said in (
        ({"version": 1}, "version 1, and this kvflow reads 2; measure it again"),
        ({"prompts": []}, "it has no measured points"),
        ({"transfer_bytes_s": 0.0}, "it has no measured points"),
    ):
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(known.profile(), **change)))
        with pytest.raises(MisuseError, match=said):
            load_profile(path)
