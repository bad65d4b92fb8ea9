"""Which vLLM the connector is for: a module with a version stands in for it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import kvflow.connectors.vllm
from kvflow.connectors.vllm.version import is_in_range
from kvflow.protocols.errors import MisuseError


def install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize(
    "version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.33.0rc1", "0.33.1.dev3+gabc"]
)
def test_any_build_of_the_releases_is_in_the_range(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(version, monkeypatch)
    assert is_in_range()


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.2", "1.32.0", "0.320.0", "dev"])
def test_other_releases_are_refused_by_name(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, monkeypatch)
    assert not is_in_range()
    with pytest.raises(MisuseError) as raised:
        kvflow.connectors.vllm.KvflowConnector  # noqa: B018 - it is loaded when it is asked for
    assert f"vLLM {version} is installed: install 'vllm>=0.32,<0.34'" in str(raised.value)


def test_the_module_has_nothing_else() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        kvflow.connectors.vllm.Other  # noqa: B018
