"""Which exact shortcuts the towers take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExactOptimizations:
    """Exact shortcuts of the towers, each by its own switch; nothing here changes a number beyond rounding.

    trim: text only to the last end-of-text token of the prompts.
    pack: every prompt only to its own end-of-text token, prompts side by side without padding; includes `trim`.
    prefix: text rows before the first one that depends on the class computed once, classes attend to them.
    last_rows: in the last block only the rows that are read out, which attend to all.
    frozen_rows: in the block where learnable tokens enter first, no backward work for the rows that do not hold them.
    folded: QuickGELU's scalings inside the matrix products beside it, image patches by one product and no convolution.
    chunk_rows: text rows in the tower at once; more are computed in chunks, and in training computed again in the
        backward pass instead of kept. None: never. At ViT-B/16 in float32 a row keeps 287 kB for the backward pass
        (12 widths of 512 in 12 layers), so 8,192 rows are 2.4 GB. ImageNet's 1,000 names fill about 5,000, and a step
        on them with 32 images stays below 8 GB in all, 6 GB with 2,048 rows at once.

    pack and prefix hold for plans that replace tokens, and that insert them before the first class-dependent row; under
    any other plan the tower falls back to padded prompts of equal length.
    """

    trim: bool = True
    pack: bool = True
    prefix: bool = True
    last_rows: bool = True
    frozen_rows: bool = True
    folded: bool = True
    chunk_rows: int | None = 8192

    def __post_init__(self) -> None:
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"chunk_rows = {self.chunk_rows}: at least one row must be in the tower, or None for all")


NO_OPTIMIZATIONS = ExactOptimizations(
    trim=False, pack=False, prefix=False, last_rows=False, frozen_rows=False, folded=False, chunk_rows=None
)
"""What public code does: every column of every prompt, every row of every block."""
