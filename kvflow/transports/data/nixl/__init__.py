"""The data plane that uses NVIDIA NIXL, over UCX."""
