"""One table of all results, statistics over it, and the paper's published figures."""
