"""Faster ways to compute what `procap.reference` computes plainly: fused cross-attention, compiled blocks."""
