"""The vLLM versions that this connector is for, and the connector's name in vLLM.

vLLM's connector interface is experimental and changes with each release. Within the range of
versions, `signatures.py` checks what the connector uses.
"""

from __future__ import annotations

import re

from kvflow.protocols.errors import MisuseError

NAME = "KvflowConnector"  # as written in --kv-transfer-config
FIRST, LAST = (0, 32), (0, 33)  # at any patch level; docs/vllm.md says which were run
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:[.+]|rc|$)")


def installed() -> str:
    """Return the version of the installed vLLM, such as "0.32.0+cpu"."""
    import vllm

    return str(vllm.__version__)


def release() -> str:
    """Return the release of the installed vLLM, such as "0.32"."""
    return ".".join(map(str, _release()))


def is_in_range() -> bool:
    """Return True if the installed vLLM is from `FIRST` to `LAST`."""
    return FIRST <= _release() <= LAST


def check_version() -> None:
    """Check that the installed vLLM is one of the range. Raises: MisuseError naming both."""
    if not is_in_range():
        first, last = (".".join(map(str, version)) for version in (FIRST, LAST))
        after = f"{LAST[0]}.{LAST[1] + 1}"
        raise MisuseError(
            f"this kvflow has a connector for vLLM {first} to {last}, and vLLM {installed()} is "
            f"installed: install 'vllm>={first},<{after}', or a kvflow that names this version"
        )


def _release() -> tuple[int, int]:
    found = _RELEASE.match(installed())
    return (int(found[1]), int(found[2])) if found else (0, 0)
