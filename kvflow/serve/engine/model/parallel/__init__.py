"""One model in several processes: pipeline stages of layers, and tensor shards of each layer."""
