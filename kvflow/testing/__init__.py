"""Parts for tests, yours too: a pair of nodes over fakes, fixtures, and a suite for data planes."""
