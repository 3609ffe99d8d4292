"""Time to a target accuracy: the same training with every contender, until it is good enough."""
