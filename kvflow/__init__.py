"""kvflow moves the KV cache of a prompt from the machine that computed it to the machine that goes on generating."""

__version__ = "0.1.0"
