"""`vllm serve` as processes that a test starts, freezes, kills, and ends by their ids."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("TEST_VLLM_VENV") or ROOT / ".venv-vllm")
MODEL = "tiny"  # as the servers call it
BLOCK = 32
START_S = 300.0
STOP_S = 20.0
_ENVIRONMENT = {
    "KVFLOW_VLLM_FEW_CORES": "1",
    "PYTHONPATH": str(ROOT),  # this tree, wherever the environment's kvflow was installed from
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


_ports = random.sample(range(20_000, 32_000), 1000)


def _free_port() -> int:
    """Return a port below 32768, from where vLLM and connections take theirs by chance."""
    while True:
        port = _ports.pop()
        with socket.socket() as unused, suppress(OSError):
            unused.bind(("127.0.0.1", port))
            return port


class Server:
    """One `vllm serve`. The role `single` has no connector."""

    def __init__(
        self,
        role: str,
        model: Path,
        logs: Path,
        *words: str,
        name: str = "",
        policy: str = "fail",
        block_size: int = BLOCK,
        environment: dict[str, str] | None = None,
        **extra: Any,
    ) -> None:
        """`policy` is vLLM's `kv_load_failure_policy`, `extra` has kvflow's settings."""
        self.role, self.name, self.port = role, name or role, _free_port()
        self.bootstrap_port = _free_port()  # of a decode: its status port
        self.url = f"http://127.0.0.1:{self.port}"
        self.status_url = f"http://127.0.0.1:{self.bootstrap_port}"
        self.log = logs / f"{self.name}.log"
        self._environment = {**os.environ, **_ENVIRONMENT, **(environment or {})}
        served = f"--host 127.0.0.1 --port {self.port} --served-model-name {MODEL} --dtype float32"
        small = (
            "--enforce-eager --max-model-len 2304 --max-num-seqs 16 --max-num-batched-tokens 256"
        )
        settings = f"{served} {small} --block-size {block_size}".split()
        self._command = [str(VENV / "bin/vllm"), "serve", str(model), *settings, *words]
        if role in KV_ROLES:
            port = "bootstrap_port" if role == "prefill" else "status_port"
            config = {
                "kv_connector": "KvflowConnector",
                "kv_role": KV_ROLES[role],
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    port: self.bootstrap_port,
                    "verify_transfers": True,
                    **extra,
                },
            }
            self._command += ["--kv-transfer-config", json.dumps(config)]
        self._process: subprocess.Popen[bytes] | None = None
        self._family: list[psutil.Process] = []  # it and all that it has started

    def start(self) -> None:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} has not been started"
        return self._process

    def wait_up(self, deadline_s: float) -> None:
        """Return when it serves. Raises: AssertionError with the end of its log."""
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    self._family = self._find_family()
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                assert self.process.poll() is None, (
                    f"{self.name} ended with {self.process.returncode}:\n{self.tail()}"
                )
                assert time.monotonic() < deadline_s, f"{self.name} does not serve:\n{self.tail()}"
                time.sleep(0.2)

    def wait_end(self, timeout_s: float = START_S) -> int:
        """Of one that cannot start. Returns its exit status."""
        return self.process.wait(timeout_s)

    def tail(self, lines: int = 60) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    @property
    def worker(self) -> psutil.Process:
        """The process in which the model runs, and kvflow's node."""
        (found,) = (
            each for each in self._find_family() if "VLLM::Worker" in " ".join(each.cmdline())
        )
        return found

    def _find_family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def start_all(servers: Iterable[Server]) -> None:
    """Return when all serve. Raises: AssertionError with the end of a log."""
    servers, deadline_s = list(servers), time.monotonic() + START_S
    for server in servers:
        server.start()
    for server in servers:
        server.wait_up(deadline_s)


def stop_all(servers: Iterable[Server]) -> None:
    """SIGTERM, and SIGKILL for those of their processes that are left after a while."""
    servers = [server for server in servers if server._process is not None]
    family = {each for server in servers for each in (*server._family, *server._find_family())}
    for each in family:
        _signal(each, signal.SIGCONT)  # a frozen one ends as well
    for server in servers:
        if server.process.poll() is None:
            server.process.terminate()
    gone = time.monotonic() + STOP_S
    for server in servers:
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(max(0.1, gone - time.monotonic()))
    _, alive = psutil.wait_procs(list(family), timeout=max(0.1, gone - time.monotonic()))
    for each in alive:
        _signal(each, signal.SIGKILL)
    for server in servers:
        server.process.wait()


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)  # psutil looks first whether the id is another process's by now
