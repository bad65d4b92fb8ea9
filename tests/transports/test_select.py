"""Planes by name."""

from __future__ import annotations

import pytest

from kvflow.protocols.errors import MisuseError
from kvflow.transports.data.select import open_plane


def test_the_name_of_a_plane_is_checked() -> None:
    assert open_plane("local", None).name == "local"
    with pytest.raises(MisuseError, match="no data plane 'carrier pigeon'; there are: local, mooncake"):
        open_plane("carrier pigeon", None)
    with pytest.raises(MisuseError, match="rate limit"):
        open_plane("local", None, rate_limit_bytes_per_s=0)
