"""Define an experiment: suites, variants, options, runs, profiles, and the published numbers beside them."""
