"""Finding the device that `--device` names, placing a step's inputs there, and waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError

CPU = torch.device("cpu")

Place = Callable[[NDArray[Any]], torch.Tensor]
"""Makes a tensor on the model's device from a numpy array. On the CPU the two share memory."""


def cuda_devices() -> list[str]:
    """Return the names of the usable CUDA devices, such as "NVIDIA H100 80GB HBM3", by number."""
    # ROCm builds of torch also name their devices cuda, so check for a CUDA build.
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def describe_devices() -> str:
    if found := cuda_devices():
        return f"torch {torch.__version__} sees " + ", ".join(
            f"cuda:{n} ({name})" for n, name in enumerate(found)
        )
    why = "" if torch.version.cuda else ", and is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device{why}"


def find_device(wanted: str) -> torch.device:
    """Return the device that `wanted` names.

    `auto` is the first CUDA device if torch finds one, otherwise the CPU. `cuda` is `cuda:0`.

    Raises: MisuseError if the name is unknown or the device does not exist.
    """
    if wanted == "cpu":
        return CPU
    found = cuda_devices()
    if wanted == "auto":
        return torch.device("cuda:0") if found else CPU
    kind, _, number_text = wanted.partition(":")
    if kind != "cuda" or not (number_text.isdecimal() or wanted == "cuda"):
        raise MisuseError(f"--device {wanted}: not auto, cpu, cuda or cuda:N")
    number = int(number_text or 0)
    if number >= len(found):
        raise MisuseError(f"--device {wanted}: it is not there; {describe_devices()}")
    return torch.device("cuda", number)


def place_on(device: torch.device) -> Place:
    """Return the function through which every input of a step reaches `device`."""
    return torch.from_numpy if device == CPU else lambda array: torch.from_numpy(array).to(device)


def wait_for(device: torch.device) -> None:
    """Block until the device finishes all work that this thread queued. On the CPU, return at once.

    Raises: the error from any work that failed on the device.
    """
    if device.type != "cuda":
        return
    # With a blocking event, this thread sleeps instead of spinning: the event loop needs the core.
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()
