"""Limits derived from the number of descriptors that this process may have (`ulimit -n`)."""

from __future__ import annotations

import resource


def descriptors_for(most: int) -> int:
    """Return `most`, or half of this process's limit on descriptors if that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // 2)
