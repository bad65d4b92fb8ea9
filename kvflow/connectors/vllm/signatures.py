"""The parts of vLLM that the connector uses, by their signatures.

A release that changes one of them is refused with its name, instead of failing in the middle of a
request. What has the same signature and another meaning is not found here: the self-test at start
finds another layout, and docs/vllm.md lists the versions that were run.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from kvflow.connectors.vllm.version import installed
from kvflow.protocols.errors import MisuseError

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
# Methods of the interface, as "module:class", with the parameters after `self`.
_METHODS: dict[str, dict[str, str]] = {
    _BASE: {
        "__init__": "vllm_config role kv_cache_config",
        "bind_connector_metadata": "connector_metadata",
        "bind_kv_cache_manager": "kv_cache_manager",
        "build_connector_meta": "scheduler_output",
        "build_connector_worker_meta": "",
        "build_kv_connector_stats": "data",
        "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
        "get_kv_connector_stats": "",
        "get_loaded_kv_cache_group_ids": "request",
        "get_mem_pool_context": "",
        "get_num_new_matched_tokens": "request num_computed_tokens",
        "get_transfer_results": "finished_req_ids",
        "handle_preemptions": "kv_connector_metadata",
        "has_pending_push_work": "",
        "on_new_request": "request",
        "register_kv_caches": "kv_caches",
        "request_finished": "request block_ids",
        "save_kv_layer": "layer_name kv_layer attn_metadata kwargs",
        "shutdown": "",
        "start_load_kv": "forward_context kwargs",
        "update_connector_output": "connector_output",
        "update_state_after_alloc": "request blocks num_external_tokens",
        "wait_for_layer_load": "layer_name",
        "wait_for_save": "",
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": {
        "request_finished_all_groups": "request block_ids"
    },
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": {
        "register_connector": "name module_path class_name"
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {"get_block_ids": "request_id"},
}
# Methods that kvflow wraps, in the API server and in every process. It passes other parameters on.
_WRAPPED: dict[str, dict[str, str]] = {
    "vllm.v1.engine.input_processor:InputProcessor": {
        "__init__": "vllm_config",
        "process_inputs": "request_id prompt params",
    },
    "vllm.v1.engine.output_processor:OutputProcessor": {"process_outputs": "engine_core_outputs"},
    "vllm.distributed.device_communicators.shm_broadcast:SpinCondition": {"wait": "timeout_ms"},
}
# Fields that an object must have, whatever else it has.
_FIELDS: dict[str, str] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults": (
        "finished_sending finished_recving failed_recving"
    ),
    "vllm.v1.kv_cache_interface:KVCacheConfig": "num_blocks kv_cache_groups",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names kv_cache_spec",
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "block_size non_causal",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "block_size sliding_window",
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": "block_size model_version tokens_per_state",
    "vllm.v1.kv_cache_interface:MambaSpec": "block_size num_speculative_blocks",
}


def check_signatures() -> None:
    """Check that vLLM has every part that the connector uses. Raises: MisuseError for the first one
    that it lacks, or has with other parameters.
    """
    _check(_METHODS)
    check_wrapped()
    for where, names in _FIELDS.items():
        found = getattr(_found(where), "__dataclass_fields__", {})
        if lacking := [name for name in names.split() if name not in found]:
            raise _unknown(f"{where} has no field {lacking[0]}")


def check_wrapped() -> None:
    """Check the methods that kvflow wraps. Raises: MisuseError, as `check_signatures` does."""
    _check(_WRAPPED, leading=True)


def _check(methods: dict[str, dict[str, str]], *, leading: bool = False) -> None:
    """With `leading`, further parameters may follow the expected ones."""
    for where, named in methods.items():
        owner = _found(where)
        for name, expected in named.items():
            if not hasattr(owner, name):
                raise _unknown(f"{where} has no {name}")
            wanted, found = expected.split(), _parameters(getattr(owner, name))
            if (found[: len(wanted)] if leading else found) != wanted:
                raise _unknown(
                    f"{where}.{name} takes ({', '.join(found)}), not ({', '.join(wanted)})"
                )


def _parameters(method: Any) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name not in ("self", "cls")]


def _found(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise _unknown(f"it has no {where}") from None


def _unknown(what: str) -> MisuseError:
    return MisuseError(
        f"this kvflow's connector does not know the interface of vLLM {installed()}: {what}"
    )
