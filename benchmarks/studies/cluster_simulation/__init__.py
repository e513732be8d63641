"""A simulated cluster of GPUs: makespan and cost of lists of runs, from measured and guessed times."""
