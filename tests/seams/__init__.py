"""Adapters that do not exist yet, each in about fifty lines, to hold the seams that they need."""
