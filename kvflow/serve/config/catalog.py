"""The settings of each role, and the name, group and description of each setting."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
from typing import Annotated, Any, get_origin, get_type_hints

import msgspec

from kvflow.serve.config.settings import DEFAULT_PORTS, ENV_PREFIX, Settings


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_HTTP = _names(
    "host port api_key admin_api_key tls_cert tls_key tls_ca tls_server_name allowed_origins "
    "log_level log_format access_log otlp_endpoint otlp_sample_ratio drain_timeout_s"
)
_MODEL = _names(
    "model_path served_model_name dtype device attention sliding_window_rows max_model_len "
    "sampling_defaults chat_template tool_call_parser reasoning_parser threads"
)
_CACHE = _names(
    "prefix_cache cache_host_bytes cache_state_bytes cache_write_policy cache_prefetch_policy l3 "
    "l3_dir l3_bytes mooncake_master mooncake_metadata_server mooncake_global_segment_size "
    "mooncake_local_buffer_size"
)
_POOL = (*_names("page_size num_pages pool_bytes mem_fraction pool_order"), *_CACHE)
_LOAD = _names(
    "max_running_requests max_queued_requests request_timeout_s schedule_low_priority_values_first"
)
_PLANE = _names(
    "disaggregation_transfer_backend disaggregation_ib_device staging staging_bytes "
    "kv_events_config kv_events_key_file verify_transfers control_key_file"
)
_WORKER = (
    *_HTTP,
    *_names("sse_keepalive_s sse_headers_after_s sglang_metrics"),
    *_MODEL,
    *_POOL,
    *_LOAD,
    *_PLANE,
)
_RETRACT = _names("new_token_ratio host_memory_bytes host_memory_full")
_RECEIVER = (
    *_names("max_quarantine_share disaggregation_prefill_tp local_prefill_chunk"),
    *_RETRACT,
)
_ROUTER = _names(
    "poll_s retry_timeout_s policy tokenizer_path balance_abs_threshold balance_rel_threshold "
    "local_prefill_tokens"
)
_SENDER = _names(
    "pp tp chunked_prefill_size max_batch_tokens transfer_rate_limit rendezvous_s "
    "optimistic_prefill max_pinned_share max_decodes decodes_per_address"
)
FIELDS_OF_ROLE: dict[str, tuple[str, ...]] = {
    "prefill": (
        *_WORKER,
        *_SENDER,
        *_names("disaggregation_mode disaggregation_bootstrap_port control_port join"),
    ),
    "decode": (
        *_WORKER,
        *_RECEIVER,
        *_names("tp disaggregation_mode disaggregation_bootstrap_port join"),
    ),
    "router": (
        *_HTTP,
        *_ROUTER,
        *_names(
            "request_timeout_s max_queued_requests prefill decode engine legs kv_events_key_file "
            "chat_template"
        ),
    ),
    "up": (
        *_WORKER,
        *_SENDER,
        *_RECEIVER,
        *_names("prefill_workers decode_workers worker_ports decode_tp start_timeout_s"),
        *_ROUTER,
    ),
}
# Headings of the help text, each with its settings in the order in which the help shows them.
GROUPS: dict[str, tuple[str, ...]] = {
    "serving": _names(
        "host port max_running_requests max_queued_requests schedule_low_priority_values_first "
        "request_timeout_s drain_timeout_s sse_keepalive_s sse_headers_after_s sglang_metrics "
        "log_level log_format access_log otlp_endpoint otlp_sample_ratio"
    ),
    "processes": _names("prefill_workers decode_workers worker_ports start_timeout_s"),
    "routing": (*_names("prefill decode engine legs join"), *_ROUTER),
    "model": (
        *_MODEL,
        *_names("pp tp decode_tp chunked_prefill_size max_batch_tokens local_prefill_chunk"),
    ),
    "pool": (
        *_POOL,
        *_RETRACT,
        *_names("max_quarantine_share max_pinned_share"),
    ),
    "disaggregation": _names(
        "disaggregation_transfer_backend disaggregation_bootstrap_port control_port "
        "disaggregation_ib_device disaggregation_mode transfer_rate_limit staging staging_bytes "
        "disaggregation_prefill_tp verify_transfers rendezvous_s optimistic_prefill "
        "max_decodes decodes_per_address kv_events_config"
    ),
    "security": _names(
        "api_key admin_api_key tls_cert tls_key tls_ca tls_server_name kv_events_key_file "
        "allowed_origins control_key_file"
    ),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
# The help shows settings by group, so it would not show a setting that is in no group.
if ungrouped := set(Settings.__struct_fields__) - _GROUP_OF.keys():
    raise AssertionError(
        f"settings that stand in no group of config.GROUPS: {', '.join(sorted(ungrouped))}"
    )
# Other names of settings. They are accepted wherever the canonical name is accepted.
ALIASES: dict[str, tuple[str, ...]] = {
    "model_path": ("model",),
    "disaggregation_bootstrap_port": ("bootstrap_port",),
    "disaggregation_transfer_backend": ("transfer_backend",),
    "disaggregation_ib_device": ("ib_device",),
}
CANONICAL = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
HINTS: dict[str, Any] = get_type_hints(Settings, include_extras=True)
FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}


def flag_of(name: str) -> str:
    """Return the flag of a setting: --page-size for `page_size`."""
    return "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    """Return the environment variable of a setting: KVFLOW_PAGE_SIZE for `page_size`."""
    return ENV_PREFIX + name.upper()


@functools.cache
def _descriptions() -> dict[str, str]:
    # Python does not keep the docstrings of fields, so they are read from the source.
    module = ast.parse(inspect.getsource(sys.modules[Settings.__module__]))
    (settings,) = (part for part in module.body if isinstance(part, ast.ClassDef))
    found = {}
    for field, text in itertools.pairwise(settings.body):
        match field, text:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(description))):
                found[name] = " ".join(description.split())
    return found


def describe(name: str) -> str:
    return _descriptions()[name]


def limits_of(name: str) -> list[str]:
    """Return the limits of a numeric setting as text, such as [">= 1", "<= 65536"]."""
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    metas = getattr(HINTS[name], "__metadata__", ())
    limits = [(sign, getattr(meta, bound)) for meta in metas for bound, sign in signs.items()]
    return [f"{sign} {limit}" for sign, limit in limits if limit is not None]


def default_of(name: str, role: str) -> Any:
    # The port is the one setting whose default depends on the role.
    return DEFAULT_PORTS[role] if name == "port" else FIELDS[name].default


def group_of(name: str) -> str:
    """Return the heading, in lower case, under which the help shows a setting."""
    return _GROUP_OF[name]


def base_type(name: str) -> Any:
    """Return a setting's type without its limits: int, float, bool, str, tuple, or a Literal."""
    hint = HINTS[name]
    return hint.__origin__ if get_origin(hint) is Annotated else hint
