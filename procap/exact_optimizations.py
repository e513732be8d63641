"""Which exact shortcuts the towers take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExactOptimizations:
    """Switches of the towers' exact shortcuts; none of them changes results beyond rounding.

    trim: cut the text after the last end-of-text token of all prompts.
    pack: cut every prompt after its own end-of-text token, and put prompts side by side unpadded; includes `trim`.
    prefix: compute the text rows before the first class-dependent row once; all classes attend to them.
    last_rows: in the last block compute only the rows that are read out, which attend to all rows.
    frozen_rows: in the block where learned tokens enter first, do no backward work for the other rows.
    constant_states: in training, compute the packed text states that enter the first block that a plan changes once
        for each set of prompts; they do not depend on anything learned.
    folded: fold QuickGELU's scalings into the adjacent matrix products, and embed patches by one matrix product.
    chunk_rows: most text rows in the tower at a time; more are computed in chunks, and training recomputes a chunk in
        the backward pass instead of keeping its activations. None: no chunks. With ViT-B/16 in float32 a row keeps
        287 kB for the backward pass (12 widths of 512 in 12 layers), so 8,192 rows are 2.4 GB. ImageNet's 1,000 names
        fill about 5,000 rows, and a step on them with 32 images stays below 8 GB in total, 6 GB with 2,048 rows.

    pack and prefix work for plans that replace tokens, or insert them before the first class-dependent row; under any
    other plan the tower falls back to padded prompts of equal length.
    """

    trim: bool = True
    pack: bool = True
    prefix: bool = True
    last_rows: bool = True
    frozen_rows: bool = True
    constant_states: bool = True
    folded: bool = True
    chunk_rows: int | None = 8192

    def __post_init__(self) -> None:
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"chunk_rows = {self.chunk_rows}: at least one row must be in the tower, or None for all")


NO_OPTIMIZATIONS = ExactOptimizations(
    trim=False,
    pack=False,
    prefix=False,
    last_rows=False,
    frozen_rows=False,
    constant_states=False,
    folded=False,
    chunk_rows=None,
)
"""No shortcuts, as in public code: compute every column of every prompt and every row of every block."""
