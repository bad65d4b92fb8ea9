"""Why a data plane cannot be used here, found out once in each process of the tests: each look
imports a library in a process of its own.
"""

from __future__ import annotations

import functools

from kvflow.serve.launch import doctor

mooncake_unavailable_reason = functools.cache(doctor.mooncake_unavailable_reason)
nixl_unavailable_reason = functools.cache(doctor.nixl_unavailable_reason)
