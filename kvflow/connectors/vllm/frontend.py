"""Checks of the settings and of `kv_transfer_params` in vLLM's API server, and reasons for failed
loads in its answers.

vLLM has no hook for any of this. A failed load would reach the client as "Internal server error".
The scheduler would find an error in `kv_transfer_params`, but it cannot answer the client. An error
in the settings would show only after vLLM loads the model. So this module wraps three methods
of vLLM, whose signatures `signatures.py` checks.
"""

from __future__ import annotations

import re
from functools import wraps
from http import HTTPStatus
from typing import Any

from kvflow.connectors.vllm.params import ToDecode, read_params
from kvflow.connectors.vllm.settings import Settings, check_engine
from kvflow.connectors.vllm.version import NAME
from kvflow.http.errors import STATUS_OF_CODE
from kvflow.protocols.errors import Cause, Code, MisuseError

_FURTHER_PROMPT = re.compile(r"cmpl-.*-[1-9][0-9]*", re.DOTALL)
CLIENT_CLOSED_REQUEST = 499  # the client of the other leg has left
# The key of the reason in the trace headers, which vLLM returns with an error.
REASON = "kvflow-failed"


def encode_reason(cause: Cause) -> str:
    return f"{cause.code} {cause.text}"


def read_reason(text: str) -> Cause:
    code, _, rest = text.partition(" ")
    return Cause(Code(code), rest)


def is_further_prompt(request_id: str) -> bool:
    """Return True for the id of a later prompt of a list: the API server numbers them from 0."""
    return _FURTHER_PROMPT.fullmatch(request_id) is not None


def _status(cause: Cause) -> HTTPStatus:
    """Return the HTTP status for a failure. HTTPStatus has no 499, so 502 replaces it."""
    found = STATUS_OF_CODE.get(cause.code, 500)
    return HTTPStatus.BAD_GATEWAY if found == CLIENT_CLOSED_REQUEST else HTTPStatus(found)


def install() -> None:
    """Wrap the three methods of vLLM. Idempotent."""
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    if not hasattr(InputProcessor.process_inputs, "__wrapped__"):
        InputProcessor.__init__ = _starting(InputProcessor.__init__)
        InputProcessor.process_inputs = _checking(InputProcessor.process_inputs)
        OutputProcessor.process_outputs = _telling(OutputProcessor.process_outputs)


def _starting(init: Any) -> Any:
    @wraps(init)
    def started(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == NAME:
            Settings.read(transfer.kv_connector_extra_config)
            check_engine(vllm_config)
        init(self, vllm_config, *args, **kwargs)

    return started


def _checking(process_inputs: Any) -> Any:
    from vllm.exceptions import VLLMValidationError

    @wraps(process_inputs)
    def checked(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        transfer = self.vllm_config.kv_transfer_config
        extra = getattr(params, "extra_args", None) or {}
        if transfer is not None and transfer.has_connector(NAME) and "kv_transfer_params" in extra:
            try:
                asked = read_params(extra["kv_transfer_params"])
                _check_role(asked, transfer)
            except MisuseError as error:
                raise VLLMValidationError(str(error), parameter="kv_transfer_params") from None
            # A room serves one prompt, and prefill's answer is about the first prompt of the list.
            if is_further_prompt(request_id):
                params.extra_args = {
                    name: value for name, value in extra.items() if name != "kv_transfer_params"
                }
            if isinstance(asked, ToDecode):
                # One completion is enough at prefill: the text of its answer is not used.
                params.n = 1
        return process_inputs(self, request_id, prompt, params, *args, **kwargs)

    return checked


def _check_role(asked: object, transfer: Any) -> None:
    if isinstance(asked, ToDecode):
        field, side, is_here = "do_remote_decode", "prefill", transfer.is_kv_producer
    else:
        field, side, is_here = "do_remote_prefill", "decode", transfer.is_kv_consumer
    if asked is not None and not is_here:
        raise MisuseError(
            f"kv_transfer_params: {field} is for a {side}, and this is a {transfer.kv_role}"
        )


def _telling(process_outputs: Any) -> Any:
    from vllm.exceptions import GenerationError, GracefulHTTPError

    class TransferError(GracefulHTTPError, GenerationError):  # type: ignore[misc]
        """An error with its own HTTP status, even within a stream. vLLM logs it in one line."""

        def __init__(self, cause: Cause) -> None:
            status = _status(cause)
            super().__init__(f"kvflow: {cause}", status)
            self.status_code = status

    @wraps(process_outputs)
    def telling(self: Any, engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            text = (output.trace_headers or {}).get(REASON)
            if text is None or str(output.finish_reason) != "error":
                continue
            state = self.request_states.get(output.request_id)
            if state is not None and state.queue is not None:
                state.queue.put(TransferError(read_reason(text)))
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    return telling
