"""Parts for tests, yours too: a pair of nodes over fakes, and the simulator."""
