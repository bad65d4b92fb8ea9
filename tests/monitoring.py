"""The dashboard of examples/monitoring, and Prometheus' programs where this machine has them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shells import ROOT

FOLDER = ROOT / "examples/monitoring"
DASHBOARD: Any = json.loads((FOLDER / "dashboard.json").read_text())
# Where .ci/setup unpacks Debian's package.
_UNPACKED = Path(sys.prefix) / "prometheus/usr/bin"


def binary(name: str) -> str:
    """Return the path of a program of Prometheus, or skip the test where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(_UNPACKED))
    if found is None:
        pytest.skip(f"{name} is not here: .ci/setup unpacks it, or apt-get install prometheus")
    return found


def expressions(interval: str) -> Iterator[str]:
    """The queries of all panels, for all workers, with this interval for rates."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", interval).replace("$worker", ".*")
