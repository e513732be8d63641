"""Make the tables of the suites, our numbers next to published ones, and render them."""
