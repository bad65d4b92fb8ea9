"""The benchmarks of kvflow, which measure every figure against a peer or a physical limit in the
same run.
"""
