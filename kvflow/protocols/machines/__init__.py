"""State machines written as total tables, and the collections that use them, such as the ledger of
loans.
"""
