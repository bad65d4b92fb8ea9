"""The data planes."""
