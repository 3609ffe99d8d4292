"""The time of a training step: who takes turns, how a step is split, and what is said about it."""
