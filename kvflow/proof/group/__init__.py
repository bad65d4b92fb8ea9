"""The ranks of one prefill group under a storm: shipped leaders, members and endpoints, in the bare
simulator.

One rank is a prefill of `kvflow.proof.bare` and a member of the group, in one process; rank 0 is
the leader, too. Here no engine begins a room by itself: it opens one when the leader has, and
computes when every rank is ready.
"""
