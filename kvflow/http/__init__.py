"""What every HTTP server of ours shares: listening, keys, limits, errors, measures."""
