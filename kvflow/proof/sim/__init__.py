"""Whole nodes in virtual time under faults."""
