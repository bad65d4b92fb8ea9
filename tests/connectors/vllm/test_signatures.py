"""What the connector uses of vLLM is compared, part by part: a module stands in for vLLM's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from kvflow.connectors.vllm import signatures
from kvflow.protocols.errors import MisuseError

METHODS = {"vllm.part:Base": {"load": "request tokens"}}
WRAPPED = {"vllm.part:Loop": {"wait": "timeout_ms"}}
FIELDS = {"vllm.part:Spec": "block_size window"}


class Base:
    def load(self, request: object, tokens: int) -> None: ...


class Changed:
    def load(self, request: object, tokens: int, hits: int) -> None: ...


class Loop:
    def wait(self, timeout_ms: int, more: int = 0) -> None: ...


class Renamed:
    def wait(self, seconds: int) -> None: ...


@dataclass
class Spec:
    block_size: int
    window: int
    more: int = 0


@dataclass
class Poor:
    block_size: int


def install(monkeypatch: pytest.MonkeyPatch, **parts: type) -> None:
    module, part = ModuleType("vllm"), ModuleType("vllm.part")
    module.__version__ = "0.33.7"  # type: ignore[attr-defined]
    vars(part).update({"Base": Base, "Loop": Loop, "Spec": Spec} | parts)
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.part", part)
    for name, value in (("_METHODS", METHODS), ("_WRAPPED", WRAPPED), ("_FIELDS", FIELDS)):
        monkeypatch.setattr(signatures, name, value)


def test_what_is_as_expected_passes_and_may_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    signatures.check_signatures()


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"Base": Changed}, "Base.load takes (request, tokens, hits), not (request, tokens)"),
        ({"Base": Loop}, "Base has no load"),
        ({"Loop": Renamed}, "Loop.wait takes (seconds), not (timeout_ms)"),
        ({"Spec": Poor}, "Spec has no field window"),
    ],
)
def test_the_first_difference_is_named(
    parts: dict[str, type], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **parts)
    with pytest.raises(MisuseError) as raised:
        signatures.check_signatures()
    assert "the interface of vLLM 0.33.7: vllm.part:" in str(raised.value)
    assert text in str(raised.value)


def test_a_part_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    del sys.modules["vllm.part"].Base
    with pytest.raises(MisuseError, match=r"it has no vllm\.part:Base"):
        signatures.check_signatures()
