"""The sizes of a ViT CLIP."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Geometry:
    """The sizes of a ViT CLIP and its activation; everything that decides the shape of the computation."""

    image_size: int
    patch_size: int
    vision_width: int
    vision_layers: int
    vision_heads: int
    text_width: int
    text_layers: int
    text_heads: int
    context_length: int
    vocab_size: int
    embed_dim: int
    quick_gelu: bool
    # 0 stands for four times the width, CLIP's own ratio.
    vision_mlp: int = 0
    text_mlp: int = 0

    def __post_init__(self) -> None:
        for mlp, width in (("vision_mlp", self.vision_width), ("text_mlp", self.text_width)):
            if not getattr(self, mlp):
                object.__setattr__(self, mlp, 4 * width)

    @property
    def layers(self) -> int:
        """Blocks of the shallower tower."""
        return min(self.vision_layers, self.text_layers)
