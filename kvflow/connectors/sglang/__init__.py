"""kvflow as a transfer backend for SGLang. Prefill writes its pages into decode's pages, and decode
reuses a page only after proof that no write can reach it.

    python -m sglang.launch_server --model-path MODEL --disaggregation-mode prefill \\
        --disaggregation-transfer-backend kvflow

If kvflow is installed in SGLang's environment, SGLang finds the backend through an entry point of
`sglang.srt.plugins`. `settings.py` has the settings.
"""

from __future__ import annotations

import logging
import sys

from kvflow.connectors.sglang.version import NAME, check_version
from kvflow.protocols.errors import MisuseError

log = logging.getLogger("sglang.kvflow")


def register() -> None:
    """Register the backend. SGLang calls this in each of its processes.

    An unsupported SGLang is left as it is, unless its command line names this backend. Raises:
    SystemExit with the versions in that case, because SGLang only logs other errors of a plugin.
    """
    try:
        check_version()
    except MisuseError as error:
        if NAME in sys.argv or f"--disaggregation-transfer-backend={NAME}" in sys.argv:
            raise SystemExit(f"kvflow: {error}") from None
        log.info("%s", error)
        return
    from kvflow.connectors.sglang import plugin

    plugin.install()
