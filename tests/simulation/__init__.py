"""Whole groups of ranks in one thread, under schedules that a seed decides."""
