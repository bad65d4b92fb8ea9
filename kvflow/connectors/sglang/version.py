"""The SGLang version that this backend supports, and the backend's name in SGLang.

The classes of a transfer backend are internal to SGLang, and change with each release.
"""

from __future__ import annotations

from kvflow.protocols.errors import MisuseError

NAME = "kvflow"  # as written in --disaggregation-transfer-backend
SUPPORTED = "0.5.23"


def installed_version() -> str:
    import sglang.version

    return str(sglang.version.__version__)


def is_supported() -> bool:
    """Return True if the installed SGLang is version `SUPPORTED`, in any build of it."""
    return installed_version().split("+")[0] == SUPPORTED


def check_version() -> None:
    """Check that the installed SGLang is supported. Raises: MisuseError naming both versions."""
    if not is_supported():
        raise MisuseError(
            f"this kvflow has a transfer backend for SGLang {SUPPORTED}, and SGLang "
            f"{installed_version()} is installed: install sglang=={SUPPORTED}, or a kvflow that "
            "names this version"
        )
