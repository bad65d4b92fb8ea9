"""Simulator of whole nodes with prefix caches, under faults, in virtual time: `kvflow sim --cache`.

Nodes and rooms are as in `proof.sim`. In front of each pool is a shipped `PrefixCache`, and behind
most of them are host memory and a `file` store in a real folder, which the next process of the same
place opens again.
"""
