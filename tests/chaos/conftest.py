"""The data planes that run between processes."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["local", "mooncake"])
def plane(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine")
    return str(request.param)
