"""`kvflow up` as a process, for clients that run in processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvflow.serve.demo_model import DEMO_MODEL_DIR
from tests.clients.programs.served import AGENT, CONTEXT, KEY, WRITER
from tests.engines import EngineServer

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("TEST_CLIENTS_VENV") or ROOT / ".venv-clients")
# Prompts with tools need a template that shows them; that of the demo model shows none.
WRITER_TEMPLATE = Path(__file__).parent / "writer.jinja"


class Server(EngineServer):
    """One fleet: a router, a prefill and a decode."""

    def __init__(self, name: str, model: Path, logs: Path, *words: str) -> None:
        super().__init__("up", name, logs)
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        given = f"--port {self.port} --served-model-name {name} --api-key {KEY}".split()
        small = f"--max-model-len {CONTEXT} --num-pages 512 --dtype float32".split()
        command = [sys.executable, "-m", "kvflow", "up", "--model-path", str(model)]
        self._command = [*command, *given, *small, *words]


def agent(model: Path, logs: Path) -> Server:
    return Server(AGENT, model, logs, "--reasoning-parser", "qwen3")


def writer(logs: Path) -> Server:
    return Server(WRITER, DEMO_MODEL_DIR, logs, "--chat-template", str(WRITER_TEMPLATE))
