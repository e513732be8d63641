"""The runtime benchmark: methods in reference and in fast mode side by side in one run."""
