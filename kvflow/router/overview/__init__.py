"""The live overview of all workers: gathered while it has viewers, once for all of them."""
