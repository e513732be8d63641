"""Replaced by test_layers.py."""
