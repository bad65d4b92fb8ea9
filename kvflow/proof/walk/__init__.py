"""The exhaustive walk over the shipped endpoints, through every state that two or three machines
and their link can reach.
"""
