"""Processes on this machine: their identities, deaths and TCP connections."""
