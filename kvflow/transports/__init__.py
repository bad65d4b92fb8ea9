"""How bytes travel: the control link, and the data planes that move pages."""
