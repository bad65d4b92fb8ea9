"""Notation of a host in an address with a port."""

from __future__ import annotations


def bracketed(host: str) -> str:
    """Return `host` as it is written before ":port": an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
