"""The clock: what a training step costs with each scheme and each peer, on a network of its own."""
