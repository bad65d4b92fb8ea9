"""Roles as processes. Only this package creates their parts from settings."""
