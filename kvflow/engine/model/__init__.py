"""A Hugging Face causal LM on our pages."""
