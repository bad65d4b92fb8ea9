"""Simulator of whole nodes with prefix caches, under faults, in virtual time: `kvflow sim --cache`.

Nodes and rooms work as in `proof.sim`. Each pool has a shipped `PrefixCache`. Most caches also use
host memory. More than half of all caches have a `file` store in a real folder. After a restart, the
next process at the same place opens that folder again.
"""
