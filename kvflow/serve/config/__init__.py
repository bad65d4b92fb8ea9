"""The settings of all roles, and where they are read."""
