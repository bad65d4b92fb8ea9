"""Which request steps when."""
