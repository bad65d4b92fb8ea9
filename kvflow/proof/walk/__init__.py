"""An exhaustive walk through every state of two or three shipped endpoints and their links."""
