"""kvflow's engine for Hugging Face models, and the servers around it."""
