"""Rules of the simulators: what must hold, whichever simulator drives the nodes.

`book.Rules` judges one run. `places` has the rules for pages, `transfers` those for writes and
messages, `rooms` and `both_sides` those for rooms and their users, and `rest` reports what is left
over. A driver (`proof.sim` for whole nodes, `proof.bare` for endpoints) reports what its data
planes, its wire and its users observe. The page accounting of the code under test is never trusted.
"""
