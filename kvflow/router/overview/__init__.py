"""What operators see of all workers at once: gathered while somebody looks, and shared by all."""
