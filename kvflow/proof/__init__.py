"""Simulators and an exhaustive walk that look for a broken promise: `kvflow sim`."""
