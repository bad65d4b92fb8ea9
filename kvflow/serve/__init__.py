"""Our own engine for Hugging Face models, and the servers around it."""
