"""The ranks of one prefill: a leader and its members agree on which rooms open, start and end."""
