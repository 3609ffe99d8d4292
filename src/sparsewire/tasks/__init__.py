"""The models and data that the command line and the papers train, one file for each task."""
