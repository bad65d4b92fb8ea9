"""Whole nodes with prefix caches, under faults, in virtual time: `kvflow sim --cache`.

All that ships takes part: nodes and rooms as in `testing.sim`; in front of each pool a
`PrefixCache`, behind most of them host memory and a `file` store in a real folder, which the next
process of the same place opens again.
"""
