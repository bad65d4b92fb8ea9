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
    _mend_windows()
    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in MAKERS:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    cuda.Event, cuda.Stream = Event, Stream
    cuda.current_stream = lambda *args, **kwargs: Stream()
    cuda.synchronize = lambda *args, **kwargs: None


def _mend_windows() -> None:
    """Make SGLang's attention on a CPU read a sliding window where it has written it.

    It writes at the places of the window's pool, and reads there at those of the other pool.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    for step in ("extend", "decode"):
        HookRegistry.register(f"{backend}._run_sdpa_forward_{step}", _in_own_pool, HookType.AROUND)


def _in_own_pool(original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    query, output, keys, values, places, *rest = args
    window = kwargs.get("sliding_window_size")
    if window is not None and backend.use_sliding_window_kv_pool:
        places = backend.token_to_kv_pool.translate_loc_from_full_to_swa(places)
    return original(backend, query, output, keys, values, places, *rest, **kwargs)


def _without_pinning(make: Any) -> Any:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
