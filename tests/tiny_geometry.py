"""The sizes of a CLIP that is small enough for tests, for fixtures and for child processes."""

from __future__ import annotations

from procap.geometry import Geometry

GEOMETRY = Geometry(
    image_size=32,
    patch_size=16,
    vision_width=128,
    vision_layers=12,
    vision_heads=2,
    text_width=64,
    text_layers=12,
    text_heads=1,
    context_length=77,
    vocab_size=49408,
    embed_dim=48,
    quick_gelu=True,
)
