"""Tools for tests of kvflow and of your own code: a pair of nodes over fakes, pytest fixtures, and
a conformance suite for data planes.
"""
