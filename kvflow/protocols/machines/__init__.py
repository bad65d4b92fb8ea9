"""State machines written as total tables, and collections that use them, such as the ledger."""
