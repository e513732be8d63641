"""Parse flags, pack missing data, print output and one-line errors."""
