"""Any Hugging Face causal LM on our pages: loading, model steps, sampling, the prefill and decode engines."""
