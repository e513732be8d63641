"""Load the paper's tables and compare our results with them."""
