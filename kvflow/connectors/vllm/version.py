"""The vLLM version that this connector supports, and the connector's name in vLLM.

vLLM's connector interface is experimental and changes with each release.
"""

from __future__ import annotations

from kvflow.protocols.errors import MisuseError

NAME = "KvflowConnector"  # as written in --kv-transfer-config
SUPPORTED = "0.32"


def is_supported() -> bool:
    """Return True if the installed vLLM is version `SUPPORTED`, at any patch level."""
    import vllm

    return str(vllm.__version__).split("+")[0].split(".")[:2] == SUPPORTED.split(".")


def check_version() -> None:
    """Check that the installed vLLM is supported. Raises: MisuseError naming both versions."""
    if not is_supported():
        import vllm

        raise MisuseError(
            f"this kvflow has a connector for vLLM {SUPPORTED}.x, and vLLM {vllm.__version__} is "
            f"installed: install vllm~={SUPPORTED}.0, or a kvflow that names this version"
        )
