"""Tool calls and reasoning: formats by model family, and incremental parsers of answers."""
