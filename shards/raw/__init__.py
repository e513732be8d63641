"""Readers of the data folders that users already have."""
