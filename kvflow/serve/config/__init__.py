"""The settings of all roles, and the code that reads them."""
