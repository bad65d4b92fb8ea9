"""Planted bugs that runs of whole nodes must find."""

from __future__ import annotations

from kvflow.proof.plant import Plant
from kvflow.proof.sim import (
    plants_decode,
    plants_dp_groups,
    plants_goodbye,
    plants_prefill,
    plants_residency,
    plants_spaces,
    plants_staging,
    plants_tables,
    plants_threads,
)

PLANTS: tuple[Plant, ...] = (
    *plants_decode.PLANTS,
    *plants_prefill.PLANTS,
    *plants_goodbye.PLANTS,
    *plants_tables.PLANTS,
    *plants_residency.PLANTS,
    *plants_staging.PLANTS,
    *plants_spaces.PLANTS,
    *plants_dp_groups.PLANTS,
    *plants_threads.PLANTS,
)
