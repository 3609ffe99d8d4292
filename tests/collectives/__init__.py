"""How messages are exchanged."""
