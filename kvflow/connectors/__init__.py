"""Connectors that run kvflow inside other engines."""
