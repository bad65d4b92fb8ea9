"""The data plane over NVIDIA NIXL, with UCX below it."""
