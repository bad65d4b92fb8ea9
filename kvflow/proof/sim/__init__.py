"""Simulator of whole nodes in virtual time, under faults."""
