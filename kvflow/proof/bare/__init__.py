"""A simulator of bare endpoints under faults, in virtual time, without an event loop or shells.

A seed takes a fraction of the time that it takes with whole nodes (`proof.sim`), so more seeds can
be played, and they reach rarer states. `proof.walk` visits every state, but only of two or three
machines.
"""
