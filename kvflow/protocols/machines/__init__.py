"""State machines as total tables, and the collections that their owners keep."""
