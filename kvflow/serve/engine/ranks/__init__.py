"""Prefill over several ranks: the first one schedules and announces each step, the others run it
too.
"""
