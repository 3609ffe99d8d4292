"""The models and data that only the studies train, one file for each task."""
