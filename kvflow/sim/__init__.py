"""The old name of `kvflow.testing`, kept for one version:
its modules under the names users know.
"""

from __future__ import annotations

import sys
import warnings

from kvflow.testing import cancellation, pair
from kvflow.testing.sim import cluster, engine, plane, rest, run, scenario
from kvflow.transports.control import memory

warnings.warn(
    "kvflow.sim is now kvflow.testing; this name goes with the next version",
    DeprecationWarning,
    stacklevel=2,
)
for _module in (cancellation, cluster, engine, pair, plane, rest, run, scenario):
    sys.modules[f"{__name__}.{_module.__name__.rsplit('.', 1)[1]}"] = _module
sys.modules[f"{__name__}.network"] = memory
