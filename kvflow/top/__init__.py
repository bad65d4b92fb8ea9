"""`kvflow top`: the router's overview in a terminal."""
