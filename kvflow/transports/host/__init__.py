"""Processes of this machine: their identity, their death, their connections."""
