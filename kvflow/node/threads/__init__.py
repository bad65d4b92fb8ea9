"""Nodes for engines without an event loop: the node runs on a loop in its own thread, and any
thread may use it.
"""
