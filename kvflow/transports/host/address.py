"""The form of a host beside its port."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """Return a host name or IP address as it stands before ":port": an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
