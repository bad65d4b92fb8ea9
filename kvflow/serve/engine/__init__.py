"""An engine that runs any Hugging Face causal LM over a paged pool."""
