"""Many shipped endpoints under faults in virtual time, without an event loop, tasks or shells.

Floor: `testing`, beside `sim` (whole nodes, whose scenarios, faults and patience it shares) and
`walk` (every state of two or three machines). Here endpoints are called directly, so a seed costs a
fraction of a whole-node one, and the same faults reach further into the protocol.
"""
