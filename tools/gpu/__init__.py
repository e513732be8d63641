"""Check and measure everything on a GPU, in small parts that can be interrupted and continued."""
