"""Simulators and an exhaustive walk that look for violations of the invariants: `kvflow sim`."""
