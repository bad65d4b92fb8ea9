"""Steps that several processes run together: the ranks of a prefill, or the shards of a decode.

The first process schedules and announces each step, and the others run it too.
"""
