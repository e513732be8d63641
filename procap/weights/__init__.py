"""Find, read and check the weights of a frozen CLIP. Nothing in a file is executed."""
