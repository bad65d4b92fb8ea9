"""`vllm serve` as processes that a test starts, freezes, kills, and ends by their ids."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil

from tests.engines import EngineServer

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("TEST_VLLM_VENV") or ROOT / ".venv-vllm")
MODEL = "tiny"  # as the servers call it
BLOCK = 32
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


class Server(EngineServer):
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
        super().__init__(role, name or role, logs)
        # The second port of a decode is its status port.
        self.status_url = f"http://127.0.0.1:{self.bootstrap_port}"
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

    @property
    def worker(self) -> psutil.Process:
        """The process in which the model runs, and kvflow's node."""
        (found,) = (
            each for each in self.find_family() if "VLLM::Worker" in " ".join(each.cmdline())
        )
        return found
