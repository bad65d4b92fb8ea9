"""The optional packages, by the extra of the distribution that brings them; pyproject.toml has the
versions.
"""

from __future__ import annotations

EXTRAS: dict[str, tuple[str, ...]] = {  # import names
    "server": ("aiohttp", "prometheus_client", "rich", "typer", "uvloop"),
    "engine": ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "jinja2"),
    "mooncake": ("mooncake",),
    "nixl": ("nixl_cu12",),
}
CORE = ("msgspec", "numpy", "xxhash", "zmq")


def missing_extra(error: ModuleNotFoundError) -> str:
    """One line that says which extra brings the module that was not found; empty when none does."""
    missing = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if missing in modules:
            return f"{missing} is not installed: pip install 'kvflow[{extra}]'"
    return ""
