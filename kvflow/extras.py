"""The optional packages, by the extra that installs them. pyproject.toml has their versions."""

from __future__ import annotations

# Import names, which may differ from the names of the distributions.
EXTRAS: dict[str, tuple[str, ...]] = {
    "server": ("aiohttp", "prometheus_client", "rich", "typer", "uvloop"),
    "engine": (
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "jinja2",
        "llguidance",
    ),
    "mooncake": ("mooncake",),
    "nixl": ("nixl_cu12",),
}
CORE = ("msgspec", "numpy", "xxhash", "zmq")


def missing_extra(error: ModuleNotFoundError) -> str:
    """Return one line that names the extra to install; empty if no extra has the module."""
    missing = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if missing in modules:
            return f"{missing} is not installed: pip install 'kvflow[{extra}]'"
    return ""
