"""The device of a model: finding the one that `--device` names, placing a step's inputs there, and
waiting for the end of a step.

Only `cuda` and `cpu` are known. This module holds all that depends on the device; the rest of the
engine asks tensors for theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError

CPU = torch.device("cpu")

Place = Callable[[NDArray[Any]], torch.Tensor]
"""Makes a tensor on the model's device from a numpy array; on the CPU they share memory."""


def cuda_devices() -> list[str]:
    """Return the names of the CUDA devices that torch can use, in order.

    A name looks like "NVIDIA H100 80GB HBM3".
    """
    # A build for ROCm calls its devices cuda, too.
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def describe_devices() -> str:
    """Return a sentence on the devices that torch finds on this machine."""
    if found := cuda_devices():
        return f"torch {torch.__version__} sees " + ", ".join(
            f"cuda:{n} ({name})" for n, name in enumerate(found)
        )
    why = "" if torch.version.cuda else ", and is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device{why}"


def find_device(wanted: str) -> torch.device:
    """Return the device that `wanted` names.

    `auto` is the first CUDA device where torch finds one, else the CPU; `cuda` is `cuda:0`.

    Raises: MisuseError when the device is not there.
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
    """Return the function that makes tensors on `device` from numpy arrays.

    All inputs of a step get there by this function.
    """
    return torch.from_numpy if device == CPU else lambda array: torch.from_numpy(array).to(device)


def wait_for(device: torch.device) -> None:
    """Return when all that this thread queued on `device` has run; on the CPU, at once.

    Raises: what ran there and failed.
    """
    if device.type != "cuda":
        return
    # A blocking event sleeps rather than spins, since the event loop needs the core.
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()
