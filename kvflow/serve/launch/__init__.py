"""Roles as processes, and the one place where their parts are made from settings."""
