"""Training of the embedded CLIP `mini`."""
