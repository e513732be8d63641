"""Train the embedded CLIP `mini`."""
