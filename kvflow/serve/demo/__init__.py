"""The command `kvflow demo`: it runs all roles on this machine, compares their output with stock
transformers, and aborts one transfer half-way.
"""
