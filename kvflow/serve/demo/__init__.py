"""The command `kvflow demo`: all roles on this machine, compared with stock transformers."""
