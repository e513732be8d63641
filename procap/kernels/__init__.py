"""Faster versions of what `procap.reference` computes plainly: fused cross-attention and compiled blocks."""
