"""Carry out one run: configuration, training, evaluation, checkpoints, meters, tracking and results."""
