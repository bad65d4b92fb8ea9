"""Loading and running a Hugging Face causal LM over a paged pool."""
