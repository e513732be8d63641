"""How training steps scale over processes: measured here, estimated for more GPUs."""
