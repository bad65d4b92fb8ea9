"""An engine that runs any Hugging Face causal LM over a paged pool: loading, model steps, sampling,
and the scheduling of prefill and decode.
"""
