"""Where the peer to measure against lives, and how to start it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvflow.bench.pair import Process
from kvflow.protocols.errors import MisuseError

POLLS_MS = (0.1, 1.0)  # polling without a pause was never the best: it starves the peer's own threads


async def open_peer(harness: str, settings: Mapping[str, str] | None = None, /, **shape: int) -> Process:
    """SGLang's pair, set up with `shape` (layers, pages, heads, dim) and environment `settings`.

    Raises: MisuseError when it is not installed.
    """
    argv, env = _command(harness)
    process = await Process.spawn(*argv, name="sglang", env=env)
    await process.ask("setup", settings=dict(settings or {}), **shape)
    return process


def _command(harness: str) -> tuple[list[str], dict[str, str]]:
    home = Path(os.environ.get("PEERS_HOME", "~/.cache/kvflow-peers")).expanduser()
    python = Path(os.environ.get("SGB_PY", str(home / "sglang-venv" / "bin" / "python")))
    if not python.exists() or not (Path(harness) / "ctl.py").exists():
        raise MisuseError(f"no SGLang harness at {harness} with {python}: run its install.sh, or leave --peer out")
    env = {"SGB_PY": str(python), "SGB_SRC": os.environ.get("SGB_SRC", str(home / "sglang-src"))}
    driver = str(Path(__file__).with_name("sglang_driver.py"))
    return [str(python), driver, str(Path(harness).resolve())], env
