"""SGLang servers as processes that a test starts, freezes, kills, and ends by their ids."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.engines import EngineServer

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("TEST_SGLANG_VENV") or ROOT / ".venv-sglang")
MODEL = "tiny"  # as the servers call it
PAGE = 16
_ENVIRONMENT = {
    # This tree, wherever the environment's kvflow was installed from, and what SGLang lacks here.
    "PYTHONPATH": f"{ROOT / 'tests/sglang/cpu'}:{ROOT}",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    # SGLang would then use the pages of a failed request again, although a prefill may still write.
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
_ALWAYS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
    "--disable-overlap-schedule --dtype float32 --max-total-tokens 8192 --mem-fraction-static 0.5 "
    "--max-running-requests 16 --host 127.0.0.1 --random-seed 1 --sleep-on-idle"
)


class Server(EngineServer):
    """One SGLang server. The role `single` computes prompts by itself."""

    def __init__(
        self,
        role: str,
        model: Path,
        logs: Path,
        *words: str,
        name: str = "",
        page: int = PAGE,
        backend: str = "kvflow",
        ranks: int = 1,
        stages: int = 1,
        at: Server | None = None,
        **settings: object,
    ) -> None:
        """`ranks` share the heads, `stages` the layers. `at` is an ended server, whose ports
        this one takes. `settings` are kvflow's, by the names of their variables in lower case.
        """
        super().__init__(role, name or role, logs)
        if at is not None:
            self.port, self.bootstrap_port, self.url = at.port, at.bootstrap_port, at.url
        named = {f"KVFLOW_SGLANG_{key.upper()}": str(value) for key, value in settings.items()}
        self._environment = {**os.environ, **_ENVIRONMENT, **named}
        self._command = [str(VENV / "bin/python"), "-m", "sglang.launch_server"]
        self._command += _ALWAYS.split()
        self._command += ["--model-path", str(model), "--served-model-name", MODEL]
        self._command += ["--port", str(self.port), "--page-size", str(page), *words]
        if ranks * stages > 1:
            self._command += ["--tp-size", str(ranks), "--pp-size", str(stages)]
            cores = [str(number % (os.cpu_count() or 1)) for number in range(ranks * stages)]
            self._environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
        if backend != "kvflow":
            del self._environment["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"]
        if role != "single":
            self._command += ["--disaggregation-mode", role]
            self._command += ["--disaggregation-transfer-backend", backend]
            self._command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if role == "decode":
            # SGLang's default copies to page-locked memory, and needs CUDA.
            self._command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]

    def tail(self, lines: int = 60) -> str:
        return "\n".join(line[:400] for line in super().tail(lines).splitlines())

    def scheduler(self) -> psutil.Process:
        """The process in which the model runs, and kvflow's node."""
        (found,) = self.schedulers()
        return found

    def schedulers(self) -> list[psutil.Process]:
        """One for each rank and stage, in their order."""
        found = [each for each in self.find_family() if "sglang::scheduler" in _title(each)]
        return sorted(found, key=_title)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
