"""Audit of the arithmetic of the paper's printed tables."""
