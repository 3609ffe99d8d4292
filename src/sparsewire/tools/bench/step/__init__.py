"""The time of a training step: turns of contenders, parts of a step, columns and report."""
