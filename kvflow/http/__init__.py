"""Parts that all HTTP servers of kvflow share: listening, keys, limits, errors and metrics."""
