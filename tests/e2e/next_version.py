"""In a forked worker (PYTEST_PLANTED): it speaks the next version of the control link.

Its frames are today's, so a worker that took it for one of its own would serve requests with it.
"""

from __future__ import annotations

import importlib

for name in (
    "kvflow.protocols.wire.messages",
    "kvflow.protocols.prefill.peers",
    "kvflow.protocols.decode.links",
    "kvflow.serve.http.operations",
):
    importlib.import_module(name).WIRE_VERSION += 1  # type: ignore[attr-defined]
