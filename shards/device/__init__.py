"""Images resized on the device, equal to Pillow's bit for bit."""
