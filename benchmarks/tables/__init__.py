"""Make the tables of the suites, our numbers beside published ones, and render them."""
