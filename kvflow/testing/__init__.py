"""Tools for tests of kvflow and of your own code: nodes over fakes, and a conformance suite."""
