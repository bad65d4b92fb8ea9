"""Transport of bytes: the control link between nodes, and the data planes that move pages."""
