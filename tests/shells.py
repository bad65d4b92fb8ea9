"""Commands of a page of this repository, run as printed: in a fresh shell, and in a network of their own."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A network of its own: the printed ports are free there, whatever runs on this machine, and the two machines are two
# addresses.
ALONE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
NETWORK = "ip link set lo up && for n in 1 2; do ip address add 10.0.0.$n/32 dev lo; done\n"
STOP = "trap 'kill $(jobs -p) && wait' EXIT\n"


def shell(script: str, cwd: Path, timeout_s: float, *before: str) -> subprocess.CompletedProcess[str]:
    """`script` in a shell that inherits nothing but where this Python and its `kvflow` are."""
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return subprocess.run(
        [*before, "bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env={"PATH": path, "HOME": str(cwd), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def has_namespaces() -> bool:
    tools = all(map(shutil.which, ("unshare", "ip")))
    return tools and not subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode


def ports_of(servers: list[str]) -> list[int]:
    return [int(port) for port in re.findall(r"port (\d+)", "".join(servers))]


def is_free(port: int) -> bool:
    with socket.socket() as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(("", port))
        except OSError:
            return False
    return True
