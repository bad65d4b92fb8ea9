"""What is reported about speed comes from here: each figure beside a peer or a physical limit of
the same run.
"""
