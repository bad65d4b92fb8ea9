"""A simulator of bare endpoints under faults, in virtual time, without an event loop or shells.

A seed takes a fraction of the time that whole nodes (`proof.sim`) take, so the same faults reach
further into the protocol. `proof.walk` visits every state, but of two or three machines only.
"""
