"""A front for engines without an event loop: a node on a loop in a thread of its own, used from any
thread.
"""
