"""kvflow inside other people's engines."""
