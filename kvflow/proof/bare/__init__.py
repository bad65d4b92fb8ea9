"""Simulator of bare endpoints: many shipped endpoints under faults, in virtual time, without an
event loop, tasks or shells.

It stands between `proof.sim` (whole nodes, whose scenarios, faults and patience it shares) and
`proof.walk` (every state of two or three machines). Endpoints are called directly, so a seed costs
a fraction of a seed of whole nodes, and the same faults reach further into the protocol.
"""
