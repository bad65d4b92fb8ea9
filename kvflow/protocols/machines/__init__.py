"""Total tables, and what is built of them."""
