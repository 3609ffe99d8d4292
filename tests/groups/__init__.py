"""Drivers and the groups that they talk in."""
