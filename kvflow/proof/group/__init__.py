"""A simulator of prefill groups under a storm of faults: shipped leaders, members and endpoints on
top of `proof.bare`.

A rank is a prefill of `kvflow.proof.bare` and a member of the group, in one process. Rank 0 is also
the leader. An engine opens a room only after the leader opens it, and computes only when every rank
is ready.
"""
