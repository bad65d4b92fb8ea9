"""Roles that are forked."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _forked_roles(forked_roles: None) -> None:
    """All roles of this folder are forked."""
