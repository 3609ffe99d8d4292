"""Which coordinates are sent."""
