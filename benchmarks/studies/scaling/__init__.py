"""Measure and estimate how training steps scale over processes."""
