"""The same parity through the real thing: `kvflow up` on a model on disk, /generate over HTTP; and
what it refuses.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvflow.serve.launch.child import Child, ChildEndedError
from kvflow.serve.launch.process import PARENT_PID
from tests.serve.engine.pair import prompt_of

NEW = 16
START_S, STOP_S, REQUEST_S, HOME_S = 90.0, 20.0, 60.0, 10.0
PAGE_SIZE, CHUNK = 16, 40
Tiny = Callable[[str], Path]
LENGTHS = (1, 15, 16, 17, 32, 39, 40, 41, 47, 48, 49, 87, 112, 160, 5, 23)


def cli(*arguments: str, **pipes: Any) -> subprocess.Popen[bytes]:
    """A real `kvflow` command, which the kernel ends with us."""
    argv = [sys.executable, "-m", "kvflow.cli", *arguments]
    return subprocess.Popen(argv, env={**os.environ, PARENT_PID: str(os.getpid())}, **pipes)


class Running:
    """`kvflow up`, and where its roles are."""

    def __init__(self, model_path: Path, more: str = "") -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = (
            f"--port 0 --dtype float32 --page-size {PAGE_SIZE} --num-pages 512 "
            f"--chunked-prefill-size {CHUNK} {more}"
        )
        self.process = cli(
            "up",
            "--model-path",
            str(model_path),
            *arguments.split(),
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )
        self.urls: dict[str, str] = {}
        self.pids: list[int] = []

    def wait_until_up(self) -> None:
        """`up` tells of its roles when all of them are healthy."""
        assert self.process.stdout is not None
        descriptor, until, seen = self.process.stdout.fileno(), time.monotonic() + START_S, b""
        while seen.count(b"\n") < 3:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            read = os.read(descriptor, 4096) if ready else b""
            assert read, f"kvflow up did not start:\n{self.last_words()}"
            seen += read
        for line in seen.decode().splitlines():
            name, url, _, pid = line.split()
            self.urls[name], self.pids = url, [*self.pids, int(pid)]

    def last_words(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-4000:].decode(errors="replace")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        """By its process id; the kernel kills its children with it."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()


pytestmark = pytest.mark.xdist_group("cli")  # one `kvflow up` for the module


@pytest.fixture(scope="module")
def up(tiny: Tiny) -> Iterator[Running]:
    running = Running(tiny("llama"))
    try:
        running.wait_until_up()
        yield running
        assert running.stop() == 0, running.last_words()
        for pid in running.pids:
            with pytest.raises(ProcessLookupError):  # nobody is left behind
                os.kill(pid, 0)
    finally:
        running.kill()


def call(url: str, body: dict[str, Any] | None = None) -> bytes:
    """GET, or POST where there is a body. Raises: HTTPError for an error status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
        found: bytes = answer.read()
    return found


def body_of(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW},
        **more,
    }


def output_ids(answer: bytes, stream: bool) -> list[int]:
    """Of a whole answer, or of the last event of a stream."""
    if stream:
        events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        assert len(events) > 2, "a stream with one event is none"
        answer = events[-2]
    found: list[int] = json.loads(answer)["output_ids"]
    return found


def check_home(running: Running) -> None:
    """Every page of both pools is free again.

    The answer's last byte may be out before they are, hence the looks.
    """
    until = time.monotonic() + HOME_S
    infos: list[Any] = []
    while time.monotonic() < until:
        infos = [
            json.loads(call(f"{running.urls[role]}/server_info")) for role in ("prefill", "decode")
        ]
        if all(info["pages"]["home"] and not info["quarantine_pages"] for info in infos):
            return
    raise AssertionError([info["pages"] for info in infos])


@pytest.mark.parametrize("stream", [False, True])
def test_sixteen_at_once_equal_generate(
    stream: bool, up: Running, expected: Callable[[str, list[int], int], list[int]]
) -> None:
    prompts = [prompt_of(length, length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = clients.map(
            lambda p: call(f"{up.urls['router']}/generate", body_of(p, stream=stream)), prompts
        )
        found = [output_ids(answer, stream) for answer in answers]
    for prompt, ids in zip(prompts, found, strict=True):
        assert ids == expected("llama", prompt, NEW), f"prompt of {len(prompt)} tokens"
    check_home(up)


def test_both_legs_without_a_router_equal_generate(
    up: Running, expected: Callable[[str, list[int], int], list[int]]
) -> None:
    """What any PD router does: the same body to prefill and to decode, which meet in a room (0 is
    one).
    """
    port = json.loads(call(f"{up.urls['prefill']}/server_info"))["disaggregation_bootstrap_port"]
    prompts = [prompt_of(length, length) for length in LENGTHS]
    bodies = [
        body_of(p, bootstrap_host="127.0.0.1", bootstrap_port=port, bootstrap_room=room)
        for room, p in enumerate(prompts)
    ]
    with ThreadPoolExecutor(2 * len(prompts)) as clients:
        prefills = [clients.submit(call, f"{up.urls['prefill']}/generate", body) for body in bodies]
        decodes = [clients.submit(call, f"{up.urls['decode']}/generate", body) for body in bodies]
        for prefill in prefills:
            prefill.result()
        found = [output_ids(decode.result(), False) for decode in decodes]
    assert found == [expected("llama", prompt, NEW) for prompt in prompts]
    check_home(up)


@pytest.mark.slow
async def test_unsupported_models_are_refused_with_one_line_and_status_2(tiny: Tiny) -> None:
    path = str(tiny("minimax"))
    for role, more in (("prefill", ("--disaggregation-bootstrap-port", "0")), ("decode", ())):
        words = ["--model-path", path, "--port", "0", *more]
        child = Child(role, role, words, quiet=True)
        with pytest.raises(ChildEndedError) as ended:
            await child.start(os.environ, START_S)
        assert ended.value.status == 2
        lines = [line for line in child.last_lines if line.strip()]
        assert [
            n for n, line in enumerate(lines) if line.startswith(f"kvflow {role}: error: ")
        ] == [len(lines) - 1]
        assert "minimax' cannot be probed: MiniMax uses cache of its own" in lines[-1]
        assert not any("Traceback" in line for line in lines)
