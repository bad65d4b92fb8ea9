"""One model over several processes: stages of layers (pipeline), and shards of each layer (tensor
parallelism).
"""
