"""The benchmarks of kvflow: every figure is measured beside a peer or a physical limit, in the same
run.
"""
