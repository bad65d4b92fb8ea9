"""kvflow as a KV connector of vLLM: prefill's blocks are written into decode's, and no block is
used again unproven.

    vllm serve MODEL --kv-transfer-config CONFIG

CONFIG is `{"kv_connector": "KvflowConnector", "kv_role": "kv_producer"}` for prefill, "kv_consumer"
for decode.

vLLM finds the connector by itself where kvflow is installed beside it (an entry point of
`vllm.general_plugins`); where plugins are off, `"kv_connector_module_path":
"kvflow.connectors.vllm"` names it. What can be set: `settings.py`.
"""

from __future__ import annotations

from typing import Any

from kvflow.connectors.vllm.version import NAME, check_version, is_supported


def register() -> None:
    """What vLLM calls once in each of its processes.

    It loads nothing until the connector is asked for.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Plugins are loaded more than once in some processes.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    if is_supported():
        from kvflow.connectors.vllm import few_cores, frontend

        frontend.install()
        few_cores.install()


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    from kvflow.connectors.vllm.connector import KvflowConnector

    return KvflowConnector
