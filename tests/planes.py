"""Why a data plane cannot be used here; cached, because each look starts a process."""

from __future__ import annotations

import functools

from kvflow.serve.launch import doctor

mooncake_unavailable_reason = functools.cache(doctor.mooncake_unavailable_reason)
nixl_unavailable_reason = functools.cache(doctor.nixl_unavailable_reason)
