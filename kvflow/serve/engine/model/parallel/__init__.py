"""One model in several processes: stages of layers (pipeline parallelism), and shards of each layer
(tensor parallelism).
"""
