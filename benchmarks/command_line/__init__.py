"""What people type and see: the commands' flags, their help, what they print and how they fail."""
