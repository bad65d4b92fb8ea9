"""The data planes that run between processes; NIXL over TCP, where a test does not ask for it, in
a soak.
"""

from __future__ import annotations

import pytest

from tests.planes import nixl_unavailable_reason


@pytest.fixture(
    params=[
        *("local", "mooncake", "nixl"),
        pytest.param("nixl over TCP", marks=pytest.mark.soak),
    ]
)
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, over = str(request.param).partition(" over ")
    if name == "mooncake":
        pytest.importorskip("mooncake.engine")
    if name == "nixl" and (reason := nixl_unavailable_reason()):
        pytest.skip(reason)
    if over:  # as between machines: it is the receiver that carries a write out
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return name


@pytest.fixture(scope="module", autouse=True)
def _forked_roles(forked_roles: None) -> None:
    """All roles of this folder are forked."""
