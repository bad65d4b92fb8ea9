"""What vLLM's API server is told: why a load failed, and which prompts have one."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from kvflow.connectors.vllm.frontend import _status, encode_reason, is_further_prompt, read_reason
from kvflow.protocols.errors import Cause, Code


@pytest.mark.parametrize("text", ["", "prefill is gone", " two  spaces\nand a line "])
@pytest.mark.parametrize("code", list(Code))
def test_a_cause_survives_as_text(code: Code, text: str) -> None:
    assert read_reason(encode_reason(Cause(code, text))) == Cause(code, text)


@pytest.mark.parametrize("code", list(Code))
def test_every_cause_has_a_status_that_vllm_can_send(code: Code) -> None:
    """`HTTPStatus(499)` would raise in vLLM's output loop, which ends the server."""
    status: int = _status(Cause(code))
    assert 400 <= status < 600


def test_prefills_client_is_not_decodes() -> None:
    assert (
        _status(Cause(Code.CLIENT_GONE)) is _status(Cause(Code.ABORTED)) is HTTPStatus.BAD_GATEWAY
    )
    assert _status(Cause(Code.CAPACITY)) is HTTPStatus.SERVICE_UNAVAILABLE


@pytest.mark.parametrize(
    ("name", "is_further"),
    [
        ("cmpl-5f1c-0", False),
        ("cmpl-5f1c-1", True),
        ("cmpl-a name of the client's\n-12", True),
        ("cmpl-5f1c-01", False),
        ("chatcmpl-5f1c-1", False),
        ("0", False),
    ],
)
def test_which_prompt_of_a_list_it_is(name: str, is_further: bool) -> None:
    assert is_further_prompt(name) is is_further
