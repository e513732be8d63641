"""Random crops on the training device, equal to Pillow's bit for bit."""
