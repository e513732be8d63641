"""The paper's printed tables, their audit, and whether our results agree with them."""
