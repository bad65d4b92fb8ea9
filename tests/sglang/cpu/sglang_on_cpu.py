"""A plugin for SGLang on a CPU: page-locked memory, events and streams of CUDA do nothing.

SGLang finds it by the entry point in `sglang_on_cpu.dist-info`, which is on the path of the servers
that tests start.
"""

from __future__ import annotations

import functools
from typing import Any, Self


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> Event:
        return Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None: ...


MAKERS = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor"),
    *("empty_like", "zeros_like", "arange", "randn"),
)


# Kernels that SGLang looks up when it imports what a hybrid model needs, whether it calls them or
# not. Here they are names without a function.
KERNELS = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")


def load() -> None:
    import torch

    for name in KERNELS:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"sgl_kernel::{name}", "() -> ()")
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in MAKERS:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = lambda *args, **kwargs: Stream()
    cuda.synchronize = lambda *args, **kwargs: None


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
