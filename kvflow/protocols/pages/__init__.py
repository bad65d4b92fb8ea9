"""Pools described, and copies planned."""
