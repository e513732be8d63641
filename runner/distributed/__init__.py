"""The processes that train one run together: joining, collectives, error propagation."""
