"""The exhaustive walk over the shipped endpoints: every state that two or three machines and their
link can reach.
"""
