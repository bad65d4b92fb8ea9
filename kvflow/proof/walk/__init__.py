"""An exhaustive walk through every state that two or three shipped endpoints and their links can
reach.
"""
