"""Define an experiment: suites, variants, options, runs, profiles, and the published numbers next to them."""
