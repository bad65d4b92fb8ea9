"""Nodes for engines without an event loop. A node runs on an event loop in a thread of its own, and
any thread may use it.
"""
