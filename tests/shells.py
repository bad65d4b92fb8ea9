"""Commands of this repository's pages, run as printed in a fresh shell."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
# A network of its own: the printed ports are free there, whatever runs on this machine, and the two
# machines are two addresses.
ALONE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)
NETWORK = "ip link set lo up && for n in 1 2; do ip address add 10.0.0.$n/32 dev lo; done\n"
STOP = "trap 'kill $(jobs -p) && wait' EXIT\n"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "dist", "*.egg-info"
)


class Checkout(NamedTuple):
    """A checkout of this repository, and the home of a user who has nothing else."""

    folder: Path
    home: Path
    path: str = PATH

    def shell(
        self, script: str, timeout_s: float, *before: str, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `script` in a shell that inherits nothing."""
        return subprocess.run(
            [*before, "bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env={"PATH": self.path, "HOME": str(self.home), "LANG": "C.UTF-8", **more},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def alone(self, script: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        return self.shell(NETWORK + script, timeout_s, *ALONE)


def set_up(folder: Path) -> Checkout:
    """A copy of this checkout, whose `.venv` is this environment, by links."""
    copy, home = folder / "checkout", folder / "home"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=_NOT_COPIED)
    (copy / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (copy / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (copy / ".venv" / ".setup-done").touch()
    # The interpreter that has made this environment is the one of that machine, so that both load
    # the same packages.
    tools = home / "tools"
    tools.mkdir(parents=True)
    (tools / "python3").symlink_to(
        Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    )
    return Checkout(copy, home, f"{tools}:{PATH}")


def with_packages_of_this_environment(script: str) -> str:
    """Let the new environment of `script` find here what it would download."""
    paths = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    made = re.search(r"^python3 -m venv (\S+) .*$", script, re.MULTILINE)
    assert made is not None, "the block makes no environment"
    # Before its own: `venv` brings a setuptools that is older than what builds kvflow.
    first = f"import sys; sys.path[:0] = {paths}"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    there = f'echo "{first}" > {made[1]}/lib/{version}/site-packages/here.pth'
    return script.replace(made[0], f"{made[0]}\n{there}")


def has_namespaces() -> bool:
    tools = all(map(shutil.which, ("unshare", "ip")))
    return (
        tools and not subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode
    )


def ports_of(script: str) -> list[int]:
    return [int(port) for port in re.findall(r"port (\d+)", script)]


def is_free(port: int) -> bool:
    with socket.socket() as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(("", port))
        except OSError:
            return False
    return True
