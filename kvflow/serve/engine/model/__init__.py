"""A Hugging Face causal LM over a paged pool."""
