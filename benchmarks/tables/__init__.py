"""The tables of the suites, ours beside published, and how they are printed."""
