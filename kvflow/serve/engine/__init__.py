"""The engine for any Hugging Face causal LM over a paged pool: loading, model steps, sampling, and
the scheduling of prefill and decode.
"""
