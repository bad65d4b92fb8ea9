"""Roles as processes; the one composition root."""
