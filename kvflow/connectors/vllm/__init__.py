"""kvflow as a KV connector for vLLM. Prefill writes its blocks into decode's blocks, and decode
reuses a block only after proof that no write can reach it.

    vllm serve MODEL --kv-transfer-config CONFIG

CONFIG is `{"kv_connector": "KvflowConnector", "kv_role": "kv_producer"}` for prefill. For decode,
`kv_role` is "kv_consumer".

If kvflow is installed in vLLM's environment, vLLM finds the connector through an entry point of
`vllm.general_plugins`. With plugins off, CONFIG must also name the module:
`"kv_connector_module_path": "kvflow.connectors.vllm"`. `settings.py` has the settings.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvflow.connectors.vllm.version import NAME, check_version, is_in_range
from kvflow.protocols.errors import MisuseError


def register() -> None:
    """Register the connector. vLLM calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Some processes load plugins more than once, and vLLM refuses to register a name twice.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
    # The other parts wrap methods of vLLM, and only those that they know. Where they do not, the
    # connector refuses to be loaded.
    if is_in_range():
        from kvflow.connectors.vllm import few_cores, frontend
        from kvflow.connectors.vllm.signatures import check_wrapped

        with suppress(MisuseError):
            check_wrapped()
            frontend.install()
            few_cores.install()


# Importing this package must not load torch. An unsupported vLLM must fail only where the connector
# is used.
def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    from kvflow.connectors.vllm.signatures import check_signatures

    check_signatures()
    from kvflow.connectors.vllm.connector import KvflowConnector

    return KvflowConnector
