"""Whole nodes in virtual time under faults (`kvflow sim`), and parts for tests, yours too: a control network in memory,
a pair of nodes on it over fake data planes, audits."""
