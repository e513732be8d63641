"""One run: its configuration, training, evaluation, checkpoints, meters, tracking and results."""
