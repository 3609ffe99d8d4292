"""How values and indices are written."""
