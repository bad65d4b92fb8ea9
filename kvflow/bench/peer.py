"""Starts the peers of the benchmarks: SGLang's prefill/decode pair, and its prefix tree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kvflow.bench.pair import Process
from kvflow.protocols.errors import MisuseError

# Polling without a pause was never the best: it starves the peer's own threads.
POLLS_MS = (0.1, 1.0)


async def open_peer(
    harness: str, shape: Mapping[str, int], pages: int, settings: Mapping[str, str] | None = None
) -> Process:
    """Start SGLang's pair with `shape`. Raises: MisuseError if SGLang is not installed."""
    argv, env = _command(harness)
    process = await Process.spawn(*argv, name="sglang", env=env)
    sizes = {name: shape[name] for name in ("layers", "heads", "dim")}
    await process.ask("setup", settings=dict(settings or {}), pages=pages, **sizes)
    return process


async def open_radix_peer(harness: str) -> Process:
    """Start SGLang's prefix tree. Raises: MisuseError if SGLang is not installed."""
    argv, env = _radix_command(harness)
    return await Process.spawn(*argv, name="sglang", env=env)


def _radix_command(harness: str) -> tuple[list[str], dict[str, str]]:
    home = _home()
    python = Path(os.environ.get("RADIX_VENV", str(home / "radix-venv"))) / "bin" / "python"
    shim = Path(harness).resolve() / "shim"
    source = os.environ.get("SGB_SRC", str(home / "sglang-src"))
    if not python.exists() or not (shim / "sitecustomize.py").exists() or not Path(source).is_dir():
        raise MisuseError(
            f"no radix harness at {harness} with {python} and {source}: run its run.sh once, or "
            "leave --peer out"
        )
    driver = str(Path(__file__).with_name("radix_driver.py"))
    # -P keeps modules of this folder, such as profile.py, from hiding standard ones.
    return [str(python), "-P", "-W", "ignore", driver], {"PYTHONPATH": f"{shim}:{source}"}


def _home() -> Path:
    return Path(os.environ.get("PEERS_HOME", "~/.cache/kvflow-peers")).expanduser()


def _command(harness: str) -> tuple[list[str], dict[str, str]]:
    home = _home()
    python = Path(os.environ.get("SGB_PY", str(home / "sglang-venv" / "bin" / "python")))
    if not python.exists() or not (Path(harness) / "ctl.py").exists():
        raise MisuseError(
            f"no SGLang harness at {harness} with {python}: run its install.sh, or leave --peer out"
        )
    env = {"SGB_PY": str(python), "SGB_SRC": os.environ.get("SGB_SRC", str(home / "sglang-src"))}
    driver = str(Path(__file__).with_name("sglang_driver.py"))
    return [str(python), driver, str(Path(harness).resolve())], env
