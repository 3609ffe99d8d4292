"""The models and data that the command line trains, one file for each task."""
