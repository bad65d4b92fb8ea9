"""Counters, histograms, and the trace of the current request."""
