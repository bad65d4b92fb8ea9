"""Nodes for engines without an event loop. A node runs on an event loop in its own thread, and
any thread may use it.
"""
