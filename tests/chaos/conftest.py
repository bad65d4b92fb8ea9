"""The data planes that run between processes."""

from __future__ import annotations

import pytest

from kvflow.launch.doctor import nixl_unavailable_reason


@pytest.fixture(params=["local", "mooncake", "nixl"])
def plane(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine")
    if request.param == "nixl" and (reason := nixl_unavailable_reason()):
        pytest.skip(reason)
    return str(request.param)
