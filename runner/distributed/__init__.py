"""Train one run in several processes: process group, collectives, error propagation."""
