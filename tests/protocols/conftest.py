"""Endpoints by themselves; see alone.py."""

from __future__ import annotations

import pytest

from tests.protocols.alone import TWO, LoneDecode, LonePrefill


@pytest.fixture
def fresh() -> LoneDecode:
    """It knows nobody."""
    return LoneDecode()


@pytest.fixture
def decode() -> LoneDecode:
    """It is linked to one prefill rank."""
    return LoneDecode().up()


@pytest.fixture
def two() -> LoneDecode:
    """It is linked to both ranks of one prefill."""
    return LoneDecode().up(TWO)


@pytest.fixture
def prefill() -> LonePrefill:
    """One decode is registered."""
    return LonePrefill().up()


@pytest.fixture
def opening() -> LonePrefill:
    """The route to the one decode that registers is being opened."""
    prefill = LonePrefill()
    prefill.register()
    return prefill
