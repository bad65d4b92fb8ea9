"""A simulator of bare endpoints: it runs many shipped endpoints under faults, in virtual time,
without an event loop, tasks or shells.

It stands between `proof.sim`, which runs whole nodes and whose scenarios, faults and patience it
shares, and `proof.walk`, which visits every state of two or three machines. It calls endpoints
directly, so a seed takes a fraction of the time that whole nodes take, and the same faults reach
further into the protocol.
"""
