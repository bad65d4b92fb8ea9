"""SGLang servers as processes that a test starts, freezes, kills, and ends by their ids."""

from __future__ import annotations

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

import psutil

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("TEST_SGLANG_VENV") or ROOT / ".venv-sglang")
MODEL = "tiny"  # as the servers call it
PAGE = 16
START_S = 300.0
STOP_S = 20.0
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
    "--disable-overlap-schedule --dtype float32 --max-total-tokens 8192 --mem-fraction-static 0.1 "
    "--max-running-requests 16 --host 127.0.0.1 --random-seed 1 --sleep-on-idle"
)
_ports = random.sample(range(20_000, 32_000), 1000)


def free_port() -> int:
    """Return a port below 32768, from where connections take theirs by chance."""
    while True:
        port = _ports.pop()
        with socket.socket() as unused, suppress(OSError):
            unused.bind(("127.0.0.1", port))
            return port


class Server:
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
        **settings: object,
    ) -> None:
        """`ranks` share the heads, `stages` the layers. `settings` are kvflow's, by the names of
        their variables in lower case.
        """
        self.role, self.name, self.port = role, name or role, free_port()
        self.bootstrap_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = logs / f"{self.name}.log"
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
        if role != "single":
            self._command += ["--disaggregation-mode", role]
            self._command += ["--disaggregation-transfer-backend", backend]
            self._command += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        if role == "decode":
            # SGLang's default copies to page-locked memory, and needs CUDA.
            self._command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
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
                    self._family = self.find_family()
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

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 60) -> str:
        return "\n".join(line[:400] for line in self.text().splitlines()[-lines:])

    def scheduler(self) -> psutil.Process:
        """The process in which the model runs, and kvflow's node."""
        (found,) = (each for each in self.find_family() if "sglang::scheduler" in _title(each))
        return found

    def find_family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


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
    family = {each for server in servers for each in (*server._family, *server.find_family())}
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
        process.send_signal(number)
