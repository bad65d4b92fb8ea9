"""The control link between decode and prefill, over ZMQ or in memory, and the registry of ranks."""
