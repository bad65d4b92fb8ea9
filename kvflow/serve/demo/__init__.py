"""The command `kvflow demo`: all roles on this machine, checked against stock transformers, with
one abort in mid-transfer.
"""
