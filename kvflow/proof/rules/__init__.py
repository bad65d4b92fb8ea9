"""Rule book of the simulators: what must hold whoever drives the nodes.

`book.Rules` is the judge of one run. `places` has the rules for pages, `transfers` those for writes
and messages, `rooms` and `both_sides` those for rooms and their users, and `rest` reports what is
left over. A driver (`proof.sim` for whole nodes, `proof.bare` for endpoints) reports facts, which
are what its data planes, its wire and its users saw. The rules never consult the books of the code
under test.
"""
