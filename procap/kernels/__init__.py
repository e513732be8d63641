"""Faster versions of plain modules: fused cross-attention and compiled blocks."""
