"""Prefill over several ranks: the first one schedules and announces each step, and the others run
it too.
"""
