"""Stand-ins for packages that SGLang imports, and that exist for CUDA only.

Python imports this module at its start, because `tests/sglang/servers.py` puts its folder on the
path. An attribute of a stand-in is an empty class. A package that is installed wins.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = (
    *("torchaudio", "flashinfer", "cuda", "quack", "tilelang", "deep_gemm", "deep_ep"),
    *("flash_attn_interface", "cutlass", "sglang_kernel", "sgl_kernel", "smg_grpc_servicer"),
    *("nvshmem", "humming", "flash_mla", "deepseek_recipe", "tml_renderers"),
)


class _Empty(type):
    """The class of stand-ins: they have any attribute, and accept any operator of types."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())


def _stand_in(name: str) -> Any:
    return _Empty(
        name,
        (),
        {
            "__init__": lambda self, *args, **kwargs: None,
            # As a decorator it returns what it decorates.
            "__call__": lambda self, *args, **kwargs: (
                args[0] if args and callable(args[0]) else None
            ),
            "__getattr__": lambda self, name: _stand_in(name),
            "__class_getitem__": classmethod(lambda cls, key: cls),
        },
    )


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _stand_in(name)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
