"""Any Hugging Face causal LM over a paged pool: loading, model steps, sampling, the prefill and
decode engines.
"""
