"""Where users plug in."""
